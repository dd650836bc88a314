"""Functions of the table against PyTorch, on torch's own operator samples and their derivatives."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mpxla.device.pjrt import operators
from mpxla.device.pjrt.graphs import decompositions
from mpxla.device.pjrt.operators.views import convert
from mpxla.device.pjrt.table import FUNCTIONS, RANDOM, implements, operator_of
from mpxla.tests.device.pjrt.operator_calls import Call, record
from mpxla.tests.device.pjrt.operator_checks import differences, run

assert operators.SUBJECTS
aten = torch.ops.aten

AT_ONCE = 40
"""Calls that are compiled together."""

SOME = """
    addmm div.floor_rounding index_put logsumexp nn.functional.batch_norm nn.functional.conv2d
    nn.functional.embedding nn.functional.layer_norm nn.functional.max_pool2d nn.functional.nll_loss
    remainder scatter_add softmax topk
""".split()


def by_hand() -> list[Call]:
    """Overloads that no sample of torch's calls in eager mode."""
    x = torch.tensor([[-2.5, -0.0, 0.5], [float("nan"), 3.0, float("inf")]])
    whole = torch.tensor([[-7, 0, 3], [5, -2, 100]])
    index = torch.tensor([[0, 1, 1], [1, 0, 1]])
    image = torch.linspace(-1, 1, 36).reshape(1, 1, 6, 6)
    matrix = image[0, 0] @ image[0, 0].mT + torch.eye(6) * torch.arange(6.0)
    one, small = torch.tensor(1.0), torch.tensor(0.05)
    heads = torch.linspace(-1, 1, 2 * 4 * 6 * 8).reshape(2, 4, 6, 8)
    attention = aten.scaled_dot_product_attention.default
    grouped = heads[:, :2]
    cases = [
        (aten.bitwise_and.Scalar, whole, 6),
        (aten.bitwise_and.Scalar_Tensor, 6, whole),
        (aten.bitwise_or.Scalar, whole, 6),
        (aten.bitwise_or.Scalar_Tensor, 6, whole),
        (aten.bitwise_xor.Scalar, whole, 6),
        (aten.bitwise_xor.Scalar_Tensor, 6, whole),
        (aten.bitwise_left_shift.Scalar_Tensor, 3, whole.abs()),
        (aten.bitwise_left_shift.Tensor_Scalar, whole, 2),
        (aten.bitwise_right_shift.Scalar_Tensor, 300, whole.abs()),
        (aten.bitwise_right_shift.Tensor_Scalar, whole, 2),
        (aten.__lshift__.Scalar, whole, 2),
        (aten.__lshift__.Tensor, whole, torch.tensor([0, 1, 3])),
        (aten.__rshift__.Scalar, whole, 2),
        (aten.__rshift__.Tensor, whole, torch.tensor([0, 1, 70])),
        *((aten.__rshift__.Scalar, torch.tensor([200, 1], dtype=torch.uint8), n) for n in (7, 8)),
        (aten._efficientzerotensor.default, (2, 3)),
        (aten.bartlett_window.default, 5),
        (aten.bartlett_window.periodic, 5, False),
        (aten.blackman_window.default, 5),
        (aten.blackman_window.periodic, 5, False),
        (aten.hamming_window.default, 5),
        (aten.hamming_window.periodic, 5, False),
        (aten.hamming_window.periodic_alpha, 5, False, 0.5),
        (aten.hamming_window.periodic_alpha_beta, 5, False, 0.5, 0.4),
        (aten.hann_window.default, 5),
        (aten.hann_window.periodic, 5, False, {"dtype": torch.float64}),
        (aten.kaiser_window.default, 5),
        (aten.kaiser_window.periodic, 5, False),
        (aten.kaiser_window.beta, 5, False, 8.0),
        (aten.clamp_max.default, x, 0.25),
        (aten.copysign.Scalar, x, -2.0),
        (aten.div.Scalar_mode, whole, -3, {"rounding_mode": "floor"}),
        (aten.div.Scalar_mode, whole, -3, {"rounding_mode": "trunc"}),
        (aten.div.Scalar_mode, x, 0.3, {"rounding_mode": "floor"}),
        (aten.floor_divide.Scalar, whole, -3),
        (aten.fmod.Scalar, whole, -3),
        (aten.digamma.default, torch.tensor([0.0, -0.0, 2.0])),
        (aten.fill.Tensor, x, torch.tensor(2.0)),
        (aten.masked_scatter.default, x, torch.zeros(2, 3, dtype=torch.bool), torch.zeros(0)),
        (aten.put.default, one, torch.tensor(0), torch.tensor([2.0]), True),
        *((aten.dist.default, image, image * image, p) for p in (0, 1, 2, 3, 0.5, float("inf"))),
        (aten.dist.default, matrix, image[0, 0, 0]),
        *((aten.polygamma.default, n, image * 7.3) for n in range(5)),
        (aten.cholesky.default, matrix + torch.eye(6)),
        (aten.cholesky.default, matrix + torch.eye(6), True),
        (aten.linalg_lu.default, matrix[:4]),
        (aten.linalg_vector_norm.default, matrix[:, :1], 2, [-1]),
        (aten.linalg_pinv.atol_rtol_tensor, matrix[:4]),
        (aten.linalg_pinv.atol_rtol_tensor, matrix, {"hermitian": True, "rtol": small}),
        (aten.linalg_pinv.atol_rtol_tensor, matrix, {"atol": one}),
        (aten.linalg_pinv.atol_rtol_tensor, matrix, {"atol": one, "rtol": small}),
        (aten.rrelu_with_noise_backward.default, image, image, image + 2, 0.1, 0.3, True, False),
        (aten.rrelu_with_noise_backward.default, image, image, image + 2, 0.1, 0.3, False, False),
        (aten.put.default, whole > 0, torch.tensor([0, 1, 1]), torch.tensor([True] * 3), True),
        (aten.scatter_add.default, whole > 4, 1, index, whole > 0),
        (aten.scatter.reduce, whole > 4, 1, index, whole > 0, {"reduce": "add"}),
        (aten.index_put.default, whole > 4, [index], (whole > 0)[:, None], True),
        (aten.isin.Scalar_Tensor, 3, whole),
        (aten.isin.Tensor_Scalar, whole, 3),
        (aten.nanmedian.default, x),
        (aten.remainder.Scalar, whole, -3),
        (aten.remainder.Scalar_Tensor, 7, whole.masked_fill(whole == 0, 4)),
        (aten.scatter.reduce, x, 1, index, x, {"reduce": "add"}),
        (aten.scatter.value_reduce, x, 1, index, 2.0, {"reduce": "multiply"}),
        (attention, heads, heads * 2, heads + 1, torch.eye(6, dtype=torch.bool)),
        (attention, heads, heads, heads, image[0, 0]),
        (attention, heads, heads, heads, None, 0.0, True, {"scale": 0.3}),
        (attention, heads, grouped, grouped, {"is_causal": True, "enable_gqa": True}),
        (aten.unbind_copy.int, whole, 1),
        (aten.renorm.default, heads.bfloat16(), 2, 1, 0.5),
        (aten.searchsorted.Scalar, torch.tensor([1.0, 2.0, 3.0]), 2.0),
        (aten.special_xlog1py.other_scalar, x, 2.0),
        (aten.special_xlog1py.self_scalar, 2.0, x.abs()),
        (aten.tril_indices.default, 3, 4, 1),
        (aten.triu_indices.default, 3, 4, -1),
        (aten.where.Scalar, x > 0, 1.0, 2.0),
        (aten.where.ScalarOther, x > 0, x, 2.0),
        (aten.where.ScalarSelf, x > 0, 1.0, x),
        (aten.xlogy.Scalar_Other, x, 2.0),
        (aten.xlogy.Scalar_Self, 2.0, x.abs()),
        (aten.upsample_nearest2d.vec, image, None, [1.5, 2.0]),
        (aten._upsample_nearest_exact2d.vec, image, [4, 9], None),
        (aten.upsample_bilinear2d.vec, image, [4, 9], True, None),
    ]
    calls = []
    for operator, *args in cases:
        keywords = args.pop() if isinstance(args[-1], dict) else {}
        expected = operator(*args, **keywords)
        calls.append(Call(operator, "by hand", (tuple(args), keywords), expected))
    return calls


def wrong(calls: list[Call]) -> list[str]:
    parts = [calls[i : i + AT_ONCE] for i in range(0, len(calls), AT_ONCE)]
    return [text for part in parts for text in differences(part)]


def comparable(calls: dict) -> list[Call]:
    # Where torch's decomposition of `mish_backward` writes in place, lowering makes it functional.
    left = {*RANDOM, aten.mish_backward.default}
    return [call for op, listed in calls.items() if op not in left for call in listed]


@functools.cache
def some_calls() -> list[Call]:
    return comparable(record(torch.float32, 1, 1, SOME))


def test_some_operators_in_float32():
    calls = some_calls()
    assert len({call.operator for call in calls}) > 30
    assert not wrong(calls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")  # torch 2.15
def test_overloads_without_samples():
    assert not wrong(by_hand())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "operator, rest, keywords",
    [
        (aten.gelu.default, [], {}),
        (aten.gelu.default, [], {"approximate": "tanh"}),
        (aten.gelu_backward.default, [2.0], {}),
        (aten.gelu_backward.default, [2.0], {"approximate": "tanh"}),
        (aten.silu.default, [], {}),
        (aten.silu_backward.default, [2.0], {}),
        (aten.softplus.default, [], {}),
        (aten.sigmoid.default, [], {}),
        (aten.log_sigmoid_forward.default, [], {}),
    ],
)
def test_activations_of_low_precision_are_rounded_once(operator, rest, keywords, dtype):
    x = torch.linspace(-8, 8, 2001, dtype=torch.float64).to(dtype)
    inputs = [*[torch.full_like(x, value) for value in rest], x]
    call = Call(operator, "activations", (tuple(inputs), keywords), operator(*inputs, **keywords))
    arrays = [jax.numpy.asarray(t.float().numpy()).astype(str(dtype)[6:]) for t in inputs]
    found, expected = run(call, arrays)[0], call.expected
    expected = expected[0] if isinstance(expected, tuple) else expected
    rounded = torch.tensor(jax.device_get(found.astype("float32"))).to(dtype).float()
    off = (rounded - expected.float()).abs()
    assert (off <= 1.01 * torch.finfo(dtype).eps * expected.float().abs() + 1e-5).all()
    assert (off > 1e-5).float().mean() < 0.01


def test_a_wrong_function_is_found(monkeypatch):
    (call,) = [c for c in some_calls() if c.operator is aten.addmm.default]
    monkeypatch.setitem(FUNCTIONS, call.operator, lambda c, a, b, **_: c + a @ b * 1.01)
    assert len(wrong([call])) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "dtype, samples, most",
    [
        (torch.float32, 12, 6),
        (torch.int64, 3, 2),
        (torch.bool, 3, 2),
        (torch.complex64, 3, 1),
        (torch.bfloat16, 3, 1),
    ],
    ids=str,
)
def test_all_operators(dtype, samples, most):
    assert not wrong(comparable(record(dtype, samples, most)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_operator_of_the_table_has_been_called():
    called = {call.operator for call in by_hand()}
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        called.update(record(dtype, 12, 1))
    of_torch = [operator for operator in FUNCTIONS if operator.namespace == "aten"]
    assert {str(operator) for operator in of_torch if operator not in called} == COMPOSED


COMPOSED = set()
"""Written with others by PyTorch in eager mode, so that no call is seen; the sweep of compiled
steps has them."""


def test_names_of_the_table_are_those_of_this_pytorch():
    with pytest.raises(LookupError, match="has no operator aten::nothing_of_this"):
        implements("nothing_of_this.default")(abs)
    with pytest.raises(ValueError, match=r"two functions for aten::add\.Tensor"):
        implements("add.Tensor")(abs)
    assert operator_of("add.Tensor") in FUNCTIONS
    assert not set(decompositions()) & {*FUNCTIONS, *RANDOM}


DRAWS = {
    "rand": (((1000,),), 0.5, 0.29),
    "randn": (((1000,),), 0.0, 1.0),
    "exponential": ((torch.zeros(1000), 2.0), 0.5, 0.5),
    "uniform": ((torch.zeros(1000), 1.0, 3.0), 2.0, 0.58),
    "bernoulli.p": ((torch.zeros(1000), 0.25), 0.25, 0.43),
    "geometric": ((torch.zeros(1000), 0.5), 2.0, 1.41),
    "randint.low": ((2, 5, (1000,)), 3.0, 0.82),
    "normal_functional": ((torch.zeros(1000), 1.0, 2.0), 1.0, 2.0),
    "log_normal": ((torch.zeros(1000), 0.0, 0.25), 1.03, 0.26),
    "bernoulli": ((torch.full((1000,), 0.25),), 0.25, 0.43),
    "normal.Tensor_float": ((torch.ones(1000), 2.0), 1.0, 2.0),
    "normal.float_float": ((1.0, 2.0, (1000,)), 1.0, 2.0),
}
"""Some by functions of the table, others by PyTorch's decompositions."""


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_have_their_distribution(name):
    args, mean, deviation = DRAWS[name]
    operator = operator_of(name)
    call = Call(operator, "by hand", (args, {}), operator(*args))
    arrays = [jax.numpy.asarray(a.numpy()) for a in args if isinstance(a, torch.Tensor)]
    (drawn,) = run(call, arrays, jax.random.key(3))
    numbers = torch.from_dlpack(drawn).double()
    assert numbers.shape == (1000,)
    assert abs(numbers.mean() - mean) < 5 * deviation / 1000**0.5
    assert abs(numbers.std() - deviation) < 0.2 * deviation


def test_a_permutation_and_a_choice_without_repetition():
    order = RANDOM[operator_of("randperm")](jax.random.key(1), 50)
    assert sorted(order.tolist()) == list(range(50)) and order.tolist() != list(range(50))
    weights = jax.numpy.asarray([[0.0, 1.0, 5.0, 0.5], [1.0, 0.0, 0.0, 1.0]])
    chosen = RANDOM[operator_of("multinomial")](jax.random.key(1), weights, 2)
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    assert 0 not in chosen[0].tolist() and set(chosen[1].tolist()) == {0, 3}
    many = RANDOM[operator_of("multinomial")](jax.random.key(1), weights, 500, True)
    assert many.shape == (2, 500) and (many[0] == 2).mean() > 0.6


def test_functions_of_random_operators_take_a_key_first():
    assert all(next(iter(inspect.signature(f).parameters)) == "key" for f in RANDOM.values())


def test_imaginary_numbers_are_true():
    numbers = np.array([0, 2j, 1], np.complex64)
    assert convert(jnp.asarray(numbers), np.dtype(bool)).tolist() == numbers.astype(bool).tolist()
