"""The null backend says what it was asked, and refuses what a device would get wrong."""

import pytest
import torch

from mpxla.errors import MpxlaError
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit

ROW = TensorSpec((3,), torch.float32)


def halves(a, b):
    return [a + b, (a > b)[:1]]


def test_results_have_the_specs_of_the_graph_and_calls_are_recorded():
    backend = NullBackend()
    program = compile_function(backend, "halves", halves, [ROW, ROW])
    given = backend.put([torch.ones(3), torch.ones(3)])
    total, is_more = program(given)
    assert (backend.spec(total), backend.spec(is_more)) == (ROW, TensorSpec((1,), torch.bool))
    assert total.source == "halves"
    assert backend.view(total).tolist() == [0.0, 0.0, 0.0]
    assert backend.put([total]) == [total]
    assert backend.calls == ["put", "halves", "view", "put"]


def test_wrong_and_donated_arguments_are_refused():
    backend = NullBackend()
    program = compile_function(backend, "halves", halves, [ROW, ROW], donated=[0])
    a, b, short = backend.put([torch.ones(3), torch.ones(3), torch.ones(2)])
    with pytest.raises(MpxlaError, match=r"halves takes .* but was called with"):
        program([a, short])
    program([a, b])
    program([b, backend.put([torch.ones(3)])[0]])
    with pytest.raises(MpxlaError, match="a buffer that was donated before"):
        program([a, b])
