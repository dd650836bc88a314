"""What the compiled update asks of a backend, on one that computes nothing."""

import pytest
import torch

from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit


def update_of(**settings):
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **settings)
    backend = NullBackend()
    return parameters, optimizer, backend, CompiledUpdate(optimizer, backend)


def step(parameters, update):
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    update.step()
    return all(p.grad is g for p, g in zip(parameters, gradients, strict=True))


def test_one_program_updates_parameters_and_state():
    parameters, optimizer, backend, update = update_of()
    kept = step(parameters, update)
    assert update.was_compiled and update.reason is None
    (program,) = backend.compiled
    shapes = [spec.shape for spec in program.inputs]
    assert shapes == [(2, 3), (2, 3), (2, 3), (4,), (4,), (4,), ()]
    assert [spec.shape for spec in program.outputs] == [(2, 3), (2, 3), (4,), (4,)]
    assert program.inputs[-1].dtype is torch.float64, "a rate has the digits of Python's numbers"
    assert backend.calls[-3:] == ["optimizer update", "assign", "publish"]
    assert kept and not any(p.any() for p in parameters), "results are the parameters"
    momenta = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    assert not any(value.any() for value in momenta)


def test_later_steps_compile_and_upload_nothing():
    parameters, optimizer, backend, update = update_of()
    step(parameters, update)
    backend.calls.clear()
    step(parameters, update)
    assert backend.calls == ["adopt", "optimizer update", "assign", "publish"]
    optimizer.param_groups[0]["lr"] = 0.05
    backend.calls.clear()
    step(parameters, update)
    assert backend.calls == ["adopt", "put", "optimizer update", "assign", "publish"]
    assert len(update._programs) == backend.num_compilations == 1


def test_a_rate_has_all_digits_of_the_number(monkeypatch):
    parameters, optimizer, backend, update = update_of()
    step(parameters, update)
    put, uploaded = backend.put, []
    monkeypatch.setattr(backend, "put", lambda tensors: put(uploaded.extend(tensors) or tensors))
    optimizer.param_groups[0]["lr"] = 0.01
    step(parameters, update)
    assert [value.item() for value in uploaded] == [0.01]


def test_a_setting_is_a_constant_of_the_program():
    parameters, optimizer, _, update = update_of()
    step(parameters, update)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(parameters, update)
    assert len(update._programs) == 2


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("donates", [True, False])
def test_parameters_and_state_are_donated_and_gradients_are_not(is_host, donates):
    parameters, _, backend, update = update_of()
    backend.is_host, backend.donates = is_host, donates
    for _ in range(2):  # the null backend refuses what was donated before
        step(parameters, update)
    (program,) = backend.compiled
    donated = [0, 1, 3, 4]  # momentum, parameter, gradient; and again
    assert sorted(program.donated) == (donated if donates else [])


def test_state_is_still_there_after_a_program_that_cannot_be_called():
    parameters, optimizer, _, update = update_of()
    step(parameters, update)
    (key,) = update._programs

    def fail(arguments):
        raise MemoryError

    update._programs[key] = fail
    with pytest.raises(MemoryError):
        step(parameters, update)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    assert [tuple(value.shape) for value in momenta] == [(2, 3), (4,)]
    assert [tuple(p.shape) for p in parameters] == [(2, 3), (4,)]
