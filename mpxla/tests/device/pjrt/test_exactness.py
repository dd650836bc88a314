"""Operators whose results have to be PyTorch's to the last bit, or nearly so in low precision."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.utils._pytree as pytree

from mpxla.device.pjrt.arrays import copy_to_device, host_copies
from mpxla.device.pjrt.compiling import CPU, compile_lowered
from mpxla.tests.device.pjrt.operator_calls import Call
from mpxla.tests.device.pjrt.operator_checks import run

aten = torch.ops.aten


def both(operator, *args, options=None, **keywords):
    """What the compiled function gives, in the dtype of what PyTorch gives; and that."""
    expected = operator(*args, **keywords)
    call = Call(operator, "by hand", (args, keywords), expected)
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    arrays = [copy_to_device(tensor, jax.devices()[0]) for tensor in tensors]
    lowered = jax.jit(functools.partial(run, call)).lower(arrays)
    (found,) = host_copies(lowered.compile(CPU | (options or {}))(arrays))
    return found, expected


_COUNT = torch.arange(1.0, 200.0)


@pytest.mark.parametrize(
    ("operator", "args", "keywords"),
    [
        (aten.div.Tensor, (_COUNT, 41.0), {}),
        (aten.div.Tensor, (_COUNT, 41), {}),
        (aten.div.Tensor, (_COUNT, 8), {}),
        (aten.div.Tensor, (_COUNT, torch.tensor(41.0)), {}),
        (aten.div.Tensor, (_COUNT.repeat(2, 1), torch.tensor([[41.0], [83.0]])), {}),
        (aten.div.Tensor, (_COUNT.long(), 41), {}),
        (aten.div.Tensor_mode, (_COUNT, 41.0), {"rounding_mode": "trunc"}),
        (aten.div.Tensor_mode, (_COUNT, 41.0), {"rounding_mode": "floor"}),
        (aten.mean.default, (torch.ones(41),), {}),
        (aten.mean.dim, (torch.ones(3, 41), [1]), {}),
        (aten.avg_pool2d.default, (torch.ones(1, 1, 41, 1), [41, 1]), {}),
        (aten.log2.default, (2.0 ** torch.arange(-20, 40),), {}),
        (aten.log2.default, (2.0 ** torch.arange(-20, 40, dtype=torch.float64),), {}),
        (aten.log10.default, (10.0 ** torch.arange(0, 11),), {}),
        (aten.log10.default, (10.0 ** torch.arange(0, 15, dtype=torch.float64),), {}),
        (aten.exp2.default, (torch.arange(-20.0, 40.0),), {}),
        (aten.exp2.default, (torch.arange(-20.0, 40.0, dtype=torch.float64),), {}),
        (aten._to_copy.default, (-_COUNT.bfloat16(),), {"dtype": torch.uint8}),
    ],
)
def test_whole_numbers_come_out_as_such(operator, args, keywords):
    found, expected = both(operator, *args, **keywords)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_are_right_in_wide_vectors(dtype):
    values = torch.linspace(-3, 3, 51, dtype=dtype)
    values[:3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    fast = {"xla_backend_optimization_level": 3}  # most tests go without
    for operator, rest in ((aten.atan.default, ()), (aten.atan2.default, (torch.tensor(1.0),))):
        found, expected = both(operator, values, *rest, options=fast)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_quotient_by_the_maximum_reaches_one():
    values = torch.arange(1.0, 100.0)[:, None] * torch.tensor([0.5, 1.0])
    found, expected = both(aten.div.Tensor, values, values.amax(1, keepdim=True))
    assert torch.equal(found, expected)
    assert (found[:, 1] == 1).all()


_INDEX = torch.zeros(3, 64, dtype=torch.int64)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("operator", "function", "keywords"),
    [
        (aten.mul.Tensor, lambda x: (x, 0.1), {}),
        (aten.div.Tensor, lambda x: (x, 0.3), {}),
        (aten.add.Tensor, lambda x: (x, 0.1), {}),
        (aten.add.Tensor, lambda x: (x, x.flip(0)), {"alpha": 0.3}),
        (aten.sub.Tensor, lambda x: (x, 0.1), {}),
        (aten.sum.default, lambda x: (x * 0 + 100,), {}),
        (aten.sum.dim_IntList, lambda x: (x + 100, [1]), {}),
        (aten.nansum.default, lambda x: (x * 0 + 100, [0]), {}),
        (aten.var.correction, lambda x: (x + 100, [1]), {}),
        (aten.cumsum.default, lambda x: (x + 1, 1), {}),
        (aten.cumprod.default, lambda x: (x / 8 + 1, 1), {}),
        (aten.logcumsumexp.default, lambda x: (x, 1), {}),
        (aten.addmm.default, lambda x: (x[0], x[:, :8], x[:8]), {}),
        (aten.elu.default, lambda x: (x,), {}),
        (aten.leaky_relu.default, lambda x: (x, 0.1), {}),
        (aten._safe_softmax.default, lambda x: (x, 1), {}),
        (aten._softmax_backward_data.default, lambda x: (x, x.softmax(1), 1, x.dtype), {}),
        (aten._log_softmax_backward_data.default, lambda x: (x, x.log_softmax(1), 1, x.dtype), {}),
        (
            aten.scatter_reduce.two,
            lambda x: (x, 0, _INDEX, x[:3], "amax"),
            {"include_self": False},
        ),
    ],
)
def test_low_precision_is_computed_in_float32(operator, function, keywords, dtype):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = both(operator, *function(x), **keywords)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=1.01 * eps, atol=eps / 16)
    assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize(
    "function", [jnp.log, jnp.exp, lambda x: jnp.log(x.astype(jnp.int8) + 1.0)]
)
def test_what_is_summed_in_low_precision_is_right_beside_the_sum(function):
    values = jnp.linspace(1, 99, 8192).astype(jnp.bfloat16)

    def summed(x):
        return jnp.sum(function(x * jnp.bfloat16(0.5)).astype(jnp.float32) / 8192)

    compiled = compile_lowered(jax.jit(summed).lower(values), "cpu")
    assert float(compiled(values)) == pytest.approx(float(summed(values)), rel=1e-2)


def test_rows_without_a_score_become_zeros():
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    scores[1] = -torch.inf
    scores[2, 3:] = -torch.inf
    scores[3, 7] = torch.nan
    values = [scores, torch.tensor(2.0), torch.tensor(-torch.inf), torch.zeros(3, 0)]
    calls = [(value, -1, {}) for value in values]
    calls += [(scores.t(), 0, {}), (scores.bfloat16(), 1, {"dtype": torch.float64})]
    for value, dim, keywords in calls:
        found, expected = both(aten._safe_softmax.default, value, dim, **keywords)
        torch.testing.assert_close(found, expected, equal_nan=True)
