"""Loss scales by themselves: how they move, what is refused, and their states."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpxla import delayed
from mpxla.errors import ConfigError, StepError
from mpxla.parallel.compute_dtype import convert, narrowed, widened, with_scaled_gradients
from mpxla.parallel.gradients.grad_scaler import GradScaler, see_all_overflows
from mpxla.parallel.gradients.loss_scale import LossScale

pytestmark = pytest.mark.unit


def moved(scale, overflows):
    values = []
    for overflow in overflows:
        scale.update(bool(overflow))
        values.append(scale.value)
    return values


def test_a_dynamic_scale_grows_after_good_steps_and_shrinks_after_an_overflow():
    scale = LossScale(None, True, {"init_scale": 8.0, "scale_window": 2})
    assert moved(scale, [0, 0, 1, 0, 0, 0, 0]) == [8, 16, 8, 8, 16, 16, 32]


def test_some_overflows_may_be_tolerated():
    settings = {"init_scale": 8.0, "delayed_shift": 2}
    assert moved(LossScale(None, True, settings), [1, 0, 1, 1]) == [8, 8, 4, 2]
    settings["consecutive_hysteresis"] = True
    assert moved(LossScale(None, True, settings), [1, 0, 1, 1]) == [8, 8, 8, 4]


def test_a_static_scale_stays():
    assert moved(LossScale(128.0, False, {}), [0, 1, 1]) == [128, 128, 128]
    assert LossScale(1.0, True, {}).value == 2.0**32


def test_an_overflow_at_the_smallest_scale_names_the_last_finite_step():
    scale = LossScale(None, True, {"init_scale": 4.0, "min_scale": 2.0})
    scale.update(False)
    scale.update(True)
    with pytest.raises(StepError, match=r"gradients of step 3 .* finite gradients was number 1"):
        scale.update(True)
    scale = LossScale(None, True, {"init_scale": 1.0})
    with pytest.raises(StepError, match="no step before had finite gradients"):
        scale.update(True)


def test_a_scale_goes_on_from_its_state():
    settings = {"init_scale": 8.0, "scale_window": 3, "delayed_shift": 2}
    scale, other = LossScale(None, True, settings), LossScale(None, True, settings)
    moved(scale, [0, 1, 0, 0])
    other.load_state_dict(scale.state_dict())
    assert moved(other, [0, 1, 1]) == moved(scale, [0, 1, 1])


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="no setting 'scale_windows'; it has init_scale"):
        LossScale(None, True, {"scale_windows": 3})
    with pytest.raises(ConfigError, match="give a positive number"):
        LossScale(-1.0, False, {})
    with pytest.raises(TypeError, match="GradScaler takes init_scale"):
        GradScaler(init_scales=2.0)


def after(scaler, overflows):
    """Scales of updates; whether gradients overflow is said here instead of by an optimizer."""
    values = []
    for overflow in overflows:
        found = {torch.device("cpu"): torch.tensor(float(overflow))}
        scaler._per_optimizer_states[0]["found_inf_per_device"] = found
        scaler.update()
        values.append(scaler.get_scale())
    return values


def test_a_scaler_moves_as_that_of_torch():
    scaler = GradScaler("cuda", init_scale=8.0, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer, expected = torch.optim.SGD([weight], lr=0.0), []
    overflows = [0, 0, 1, 0, 1, 0, 0, 0]
    for overflow in overflows:
        weight.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.scale(weight.sum())
        theirs.step(optimizer)
        theirs.update()
        expected.append(theirs.get_scale())
    assert after(scaler, overflows) == expected
    assert scaler.state_dict() == theirs.state_dict()
    other = GradScaler()
    other.load_state_dict(theirs.state_dict())
    assert after(other, [0, 0]) == after(scaler, [0, 0])


def test_a_scaler_that_cannot_help_says_so():
    scaler = GradScaler(init_scale=2.0**-39, growth_interval=1000)
    assert after(scaler, [0, 1]) == [2.0**-39, 2.0**-40]
    with pytest.raises(StepError, match="finite gradients was number 1"):
        after(scaler, [1])
    see_all_overflows()
    optimizer = SimpleNamespace(unscale_gradients=lambda scale: False)
    for unused in (scaler, torch.amp.GradScaler("cpu")):
        with pytest.raises(StepError, match="this scaler has scaled no loss"):
            unused.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()


def test_batch_norms_stay_in_float32_and_parameters_the_same_objects():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    before = list(model.parameters())
    convert(model, torch.bfloat16)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    types = [part.weight.dtype for part in model]
    assert types == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert model[1].running_mean.dtype is torch.float32


def test_a_module_that_needs_float32_is_named():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("wave", nn.ParameterDict({"phase": torch.ones(2, dtype=torch.complex64)}))
    with pytest.raises(ConfigError, match=r"wave \(ParameterDict\) has the complex phase.*fp16"):
        convert(model, torch.float16)


def test_inputs_and_outputs_are_converted():
    values = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "name": "x"}
    narrow = narrowed(values, torch.float16)
    assert (narrow["x"].dtype, narrow["ids"].dtype) == (torch.float16, torch.int64)
    assert widened(narrow, torch.float16)["x"].dtype is torch.float32


def test_plain_backwards_are_scaled_within_the_model_alone():
    weight, x = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    (inside,) = with_scaled_gradients([x], 1 / 8)
    result = with_scaled_gradients({"y": inside * weight}, 8.0)["y"]
    result.sum().backward()
    assert weight.grad.tolist() == [16.0] * 3
    assert x.grad.tolist() == [1.0] * 3


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 8), nn.Tanh())


def test_a_model_without_values_is_converted_when_it_gets_them():
    expected = small_net()
    convert(expected, torch.bfloat16)
    with delayed.build_delayed():
        model = small_net()
    convert(model, torch.bfloat16)
    assert model[0].weight.is_meta and model[0].weight.dtype is torch.bfloat16
    convert(model, torch.bfloat16)  # changes nothing
    for name, value in expected.state_dict().items():
        found = delayed.materialize(name, model.state_dict(keep_vars=True)[name])
        assert found.dtype is value.dtype and torch.equal(found, value), name
