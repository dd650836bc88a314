"""The loops of recurrent layers compute what their steps written one by one compute."""

import jax
import jax.numpy as jnp
import pytest
import torch

from mpxla.device.pjrt import operators
from mpxla.device.pjrt.table import FUNCTIONS
from mpxla.graph.recurrent import DERIVATIVE, STEPS

pytestmark = pytest.mark.unit

assert operators.SUBJECTS, "importing them fills the table"

STEP, SEQUENCES, HIDDEN = 5, 4, 3
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
MASK = torch.arange(STEP)[:, None] < torch.tensor([3, 5, 1, 4])
ANY_MASK = torch.rand(STEP, SEQUENCES, generator=torch.Generator().manual_seed(0)) > 0.5


def array(value):
    if isinstance(value, (list, tuple)):
        return [array(v) for v in value]
    return jnp.asarray(value.detach().numpy()) if isinstance(value, torch.Tensor) else value


def compare(operator, *arguments):
    expected = operator(*arguments)
    found = [torch.tensor(jax.device_get(v)) for v in FUNCTIONS[operator](*map(array, arguments))]
    torch.testing.assert_close(found, expected)
    return expected


CASES = [(k, m, r) for k in GATES for m in (None, MASK, ANY_MASK) for r in (False, True)]
QUICK = [("gru", MASK, True)]


@pytest.mark.parametrize(
    ("kind", "mask", "is_reversed"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_as_written_one_by_one(kind, mask, is_reversed):
    torch.manual_seed(0)
    rows = GATES[kind] * HIDDEN
    given = torch.randn(STEP, SEQUENCES, rows), mask
    for has_bias in (True, False):
        for projected in (0, 2) if kind == "lstm" else (0,):
            width = projected or HIDDEN
            states = [torch.randn(SEQUENCES, width)]
            states += [torch.randn(SEQUENCES, HIDDEN)] if kind == "lstm" else []
            weights = [torch.randn(rows, width)]
            weights += [torch.randn(rows)] if has_bias else []
            weights += [torch.randn(projected, HIDDEN)] if projected else []
            options = kind, is_reversed
            found = compare(STEPS, *given, states, weights, *options)
            gradients = [torch.randn_like(value) for value in found]
            compare(DERIVATIVE, gradients, *given, states, weights, found, *options)
