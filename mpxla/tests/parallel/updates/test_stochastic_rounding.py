"""Stochastic rounding: its statistics and seeds, and updates against updates by hand."""

import math

import pytest
import torch
from torch import nn

from mpxla.config import Config
from mpxla.config_sources import resolve
from mpxla.device.eager import EagerBackend
from mpxla.env import ROUNDING_VARIABLE, read_environment
from mpxla.errors import ConfigError
from mpxla.parallel.programs import Programs
from mpxla.parallel.updates.pieces import OptimizerPieces
from mpxla.parallel.updates.rounding import UpdateRounding
from mpxla.parallel.updates.stochastic_rounding import (
    Noise,
    Origin,
    StochasticRounding,
    check_parameters,
    origin_of_state,
    rounded_values,
)
from mpxla.parallel.updates.update import CompiledUpdate

BF16 = torch.bfloat16
WEIGHT = Origin("weight", 0)


def rounded_often(values, num_updates, seed=3, origin=WEIGHT):
    """[num_updates, ...] in float32."""
    rounding, results = StochasticRounding(seed), []
    for _ in range(num_updates):
        rounding.advance()
        (result,) = rounded_values([origin], rounding.key(), values)
        results.append(result.float())
    return torch.stack(results)


def neighbors_of(values):
    """What bfloat16 has toward zero and away from it."""
    toward = values.view(torch.int32) & -0x10000
    return toward.view(torch.float32), (toward + 0x10000).view(torch.float32)


def test_the_mean_is_the_value():
    num_updates = 400
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    values[1000:2000] *= 1e-30
    values[2000:] = 1 + (values[2000:] * 2.0**-10)  # beside 1.0, where the grid changes
    toward, away = neighbors_of(values)
    found = rounded_often(values, num_updates)
    assert ((found == toward) | (found == away)).all()
    chance = (values - toward) / (away - toward)
    share = (found == away).float().mean(0)
    is_between = (chance > 0.05) & (chance < 0.95)
    deviation = (share - chance) / (chance * (1 - chance) / num_updates).sqrt()
    assert abs(deviation[is_between].mean()) < 4 / math.sqrt(is_between.sum())
    assert deviation[is_between].std() == pytest.approx(1, abs=0.05)
    assert deviation[is_between].abs().max() < 5


def test_neither_neighbors_nor_updates_are_alike():
    values = torch.full((4000,), 1 + 2.0**-8)
    ups = (rounded_often(values, 50) > 1).float() - 0.5
    for a, b in ((ups[1:], ups[:-1]), (ups[:, 1:], ups[:, :-1]), (ups[:, 1024:], ups[:, :-1024])):
        assert abs((a * b).mean() * 4) < 4 / math.sqrt(a.numel())
    other = (rounded_often(values, 50, origin=Origin("bias", 0)) > 1).float() - 0.5
    assert abs((ups * other).mean() * 4) < 4 / math.sqrt(ups.numel())


def test_numbers_of_bfloat16_stay():
    specials = [0.0, -0.0, 1.0, -3.0, float("inf"), -float("inf"), float("nan"), 2.0**-120, 2e38]
    values = torch.tensor(specials).to(BF16).float()
    for result in rounded_often(values, 20):
        torch.testing.assert_close(result, values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit(), values.signbit())


@pytest.mark.parametrize("bounds", [(0, 5), (7, 1024), (1000, 2100), (1024, 3000), (2999, 3000)])
def test_a_piece_has_the_noise_of_its_elements(bounds):
    key = StochasticRounding(1).key()
    whole = Noise(key).of(WEIGHT, (3000,))
    piece = Noise(key).of(Origin("weight", bounds[0]), (bounds[1] - bounds[0],))
    assert torch.equal(piece, whole[slice(*bounds)])
    assert len(set(whole.tolist())) > 2990
    assert 0 <= whole.min() and whole.max() < 1


def test_seed_and_count_give_the_noise():
    first, second = StochasticRounding(5), StochasticRounding(6)
    assert not torch.equal(first.key(), second.key())
    before = first.key()
    first.advance()
    assert not torch.equal(first.key(), before)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.key(), second.key())


class Counting(torch.optim.Optimizer):
    """Counts in Python, so that its update is not compiled; keeps one state in float32."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(count=0, mean=torch.ones_like(p), wide=torch.ones(p.shape))
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.01)
                state["wide"].add_(p.grad, alpha=1e-3)
                p.sub_(state["mean"] * state["wide"] * (group["lr"] / state["count"] ** 0.5))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.99),
    "dampening": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.99, dampening=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.99, 0.999)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Counting": Counting,
}


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(BF16) for shape in ((40, 30), (7,))]


def made(kind):
    generator = torch.Generator().manual_seed(9)
    values = [torch.randn(shape, generator=generator) for shape in ((40, 30), (7,))]
    parameters = [nn.Parameter(value.to(BF16)) for value in values]
    return parameters, OPTIMIZERS[kind](parameters)


def stepped(kind, num_steps):
    parameters, optimizer = made(kind)
    backend, rounding = EagerBackend(), StochasticRounding(4)
    origins = {id(p): Origin(f"p{i}", 0) for i, p in enumerate(parameters)}
    update = CompiledUpdate(
        optimizer,
        backend,
        OptimizerPieces(optimizer, {}),
        UpdateRounding(optimizer, rounding, lambda: origins, Programs(backend)),
    )
    for step in range(num_steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        rounding.advance()
        update.step()
        assert all(p.dtype is BF16 and p.grad.dtype is BF16 for p in parameters)
    return parameters, optimizer, update


def stepped_by_hand(kind, num_steps):
    """Float32 in every step; what is in bfloat16 is rounded after it."""
    parameters, optimizer = made(kind)
    types = {}
    rounding = StochasticRounding(4)
    for step in range(num_steps):
        rounding.advance()
        noise = Noise(rounding.key())
        if not types:
            trial, first = made(kind)
            for parameter, gradient in zip(trial, gradients(step), strict=True):
                parameter.grad = gradient
            first.step()
            states = [first.state.get(parameter, {}) for parameter in trial]
            types = {k: getattr(v, "dtype", None) for state in states for k, v in state.items()}
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = None
            parameter.data = parameter.data.float()
            parameter.grad = gradient.float()
            for key, value in optimizer.state.get(parameter, {}).items():
                if types[key] is BF16:
                    optimizer.state[parameter][key] = value.float()
        optimizer.step()
        for index, parameter in enumerate(parameters):
            origin, parameter.grad = Origin(f"p{index}", 0), None
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if types[key] is BF16:
                    source = origin_of_state(origin, key, value, parameter)
                    state[key] = rounded_with(value, noise, source)
            parameter.data = rounded_with(parameter.data, noise, origin)
    return parameters, optimizer


def rounded_with(value, noise, origin):
    toward, away = neighbors_of(value)
    near = value.to(BF16).float()
    other = torch.where(near == toward, away, toward)
    part = (value - near).abs() / (away - toward).abs()
    return torch.where(part > noise.of(origin, value.shape), other, near).to(BF16)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("SGD", "AdamW")))
        for kind in OPTIMIZERS
    ],
)
def test_updates_are_those_in_float32_rounded(kind):
    parameters, optimizer, update = stepped(kind, 30)
    expected, by_hand = stepped_by_hand(kind, 30)
    assert (update.reason is None) == (kind != "Counting")
    for found, other in zip(parameters, expected, strict=True):
        # Elements on the edge may fall to the other side where float32 is rounded differently.
        assert (found == other).float().mean() > 0.97
        torch.testing.assert_close(found, other, rtol=2**-6, atol=1e-4)
        state, wanted = optimizer.state[found], by_hand.state[other]
        types = [{k: v.dtype for k, v in s.items() if torch.is_tensor(v)} for s in (state, wanted)]
        assert types[0] == types[1]
    if kind == "Counting":
        assert optimizer.state[parameters[0]]["wide"].dtype is torch.float32


def test_parameters_are_narrow_again_after_a_failure():
    parameters, optimizer, update = stepped("Counting", 2)
    optimizer.state[parameters[0]]["count"] = "no number"
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError):
        update.step()
    assert all(p.dtype is BF16 and p.grad.dtype is BF16 for p in parameters)


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ([torch.float32], "all parameters of this optimizer are float32. Set bf16: True"),
        ([BF16, torch.float16], "holds float16 parameters, whose small values it would lose"),
    ],
    ids=["float32", "float16"],
)
def test_there_has_to_be_something_to_round(dtypes, text):
    with pytest.raises(ConfigError, match=text):
        check_parameters([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])
    check_parameters([nn.Parameter(torch.ones(2, dtype=d)) for d in (BF16, torch.float32)])


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"fp16": True}, "is for bfloat16; fp16: True keeps float32 masters"),
        ({"fp16_params": True}, "is for bfloat16; fp16_params: True keeps float32 masters"),
        ({"master_dtype": "float32"}, "trains without masters; remove it or master_dtype: float32"),
    ],
    ids=["fp16", "fp16_params", "master_dtype"],
)
def test_keys_that_exclude_it(keys, text):
    environment = read_environment({})
    with pytest.raises(ConfigError, match=text):
        resolve({"stochastic_rounding": True, **keys}, environment)
    assert Config(stochastic_rounding=True, bf16=True, master_dtype="same").stochastic_rounding


def test_the_variable_of_neuron():
    def is_on(keys, **more):
        environ = {ROUNDING_VARIABLE: "1", "PJRT_DEVICE": "CPU", **more}
        return resolve(keys, read_environment(environ)).stochastic_rounding

    assert is_on({"bf16": True, "master_dtype": "same"})
    assert not is_on({"bf16": True})  # masters lose nothing
    assert not is_on({"fp16": True, "master_dtype": "same"})
    assert not is_on({"master_dtype": "same"}, PJRT_DEVICE="NEURON")  # its hardware does it
    assert not is_on({"master_dtype": "same"}, **{ROUNDING_VARIABLE: "0"})
    assert not is_on({"master_dtype": "same", "stochastic_rounding": False})
