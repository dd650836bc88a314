"""Views by strides mean the elements that they have in PyTorch, however values travel."""

import re

import pytest
import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.stages_by_hand import differences, run_in_stages, run_plainly

pytestmark = pytest.mark.ranks


class Strided(nn.Module):
    """Layers around a view of a transposed tensor: [batch, 8, 8], the last dim the outer one."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(torch.tanh(self.first(x)).transpose(1, 2))
        return self.last(getattr(self, self.kind)(h)).square().mean()

    def overlapping(self, h):
        return h.as_strided((h.size(0), 6, 6), (h.stride(0), 3, 2))

    def from_an_offset(self, h):
        return h.as_strided((h.size(0), 6, 6), (h.stride(0), 3, 2), 1)

    def written(self, h):
        h = h.clone()
        h.as_strided((h.size(0), 3), (h.stride(0), 5)).fill_(0.5)
        return h.transpose(1, 2)[..., :6]

    def written_and_read(self, h):
        h = h.clone()
        h.as_strided((h.size(0), 3), (h.stride(0), 5)).fill_(0.5)
        return h.as_strided((h.size(0), 6, 6), (h.stride(0), 3, 2))

    def of_a_part(self, h):
        return h[:, 1:7].as_strided((h.size(0), 6, 6), (h.stride(0), 3, 2))

    def beyond(self, h):
        return h[:1].as_strided((2, 6, 6), (h.stride(0), 3, 2))


def loss_of(model, batch):
    return model(batch["x"])


def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(2, 8, 6)}


def problem_of(kinds):
    """What is different in stages from plain PyTorch, or refused, by kind."""
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        model = Strided(kind)
        try:
            staged = run_in_stages(model, loss_of, batch())
        except CaptureError as error:
            found[kind] = str(error)
        else:
            found[kind] = differences(run_plainly(model, loss_of, batch()), staged)
    return found


@pytest.mark.slow
def test_views_by_strides_in_stages():
    kinds = ["overlapping", "from_an_offset", "written", "written_and_read"]
    assert run_ranks(problem_of, 1, kinds) == [dict.fromkeys(kinds, "")]


def test_views_of_what_a_tensor_is_a_part_of_are_refused():
    (found,) = run_ranks(problem_of, 1, ["of_a_part", "beyond"])
    for text in found.values():
        assert re.search(r"as_strided in .*test_strides\.py:\d+: .* call contiguous\(\)", text)
