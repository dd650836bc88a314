"""The update takes the memory of parameters and state, unless somebody else sees it."""

import jax
import pytest
import torch

from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.parallel.update import CompiledUpdate

SIZE = 1 << 14
NUM_STEPS = 5


@pytest.fixture(scope="module")
def backend():
    return PjrtBackend("cpu")


def make():
    parameters = [torch.nn.Parameter(torch.ones(SIZE) * i) for i in (1, 2)]
    return parameters, torch.optim.AdamW(parameters, lr=0.1)


def moments(parameters, optimizer):
    return [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]


def train(parameters, optimizer, update, before_last):
    """Steps by equal gradients; a function is called before the last one."""
    for number in range(NUM_STEPS):
        for p in parameters:
            p.grad = torch.linspace(-1, 1, SIZE) * (number + 1)
        if number == NUM_STEPS - 1:
            before_last()
        update()


def places(tensors):
    return {tensor.data_ptr() for tensor in tensors}


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_results_take_the_memory_of_parameters_and_state(backend):
    parameters, optimizer = make()
    update, before, live = CompiledUpdate(optimizer, backend), set(), []

    def note():
        before.update(places([*parameters, *moments(parameters, optimizer)]))
        live.append(live_bytes())

    train(parameters, optimizer, update.step, note)
    assert update.was_compiled
    assert len(before) == 6
    assert before == places([*parameters, *moments(parameters, optimizer)])
    optimizer.zero_grad()  # the arrays of the gradients, of which there were none before
    assert live_bytes() - live[0] < SIZE * 4, "no second copy of anything"
    (program,) = update._programs.values()
    assert program._call.memory_analysis().alias_size_in_bytes >= 6 * SIZE * 4


def test_a_tensor_of_the_state_keeps_its_numbers_and_a_view_of_a_parameter_follows(backend):
    parameters, optimizer = make()
    update, held, copies, views = CompiledUpdate(optimizer, backend), [], [], []

    def hold():
        held.extend(moments(parameters, optimizer))
        copies.extend(tensor.clone() for tensor in held)
        views.extend(p.data for p in parameters)

    train(parameters, optimizer, update.step, hold)
    assert len(held) == 4 and all(map(torch.equal, held, copies))
    assert len(views) == 2 and all(map(torch.equal, views, parameters))
    now = [*parameters, *moments(parameters, optimizer)]
    assert not places(held) & places(now), "what somebody sees is not taken"
    plain, inner = make()
    train(plain, inner, inner.step, lambda: None)
    expected = [*plain, *moments(plain, inner)]
    for found, wanted in zip(now, expected, strict=True):
        torch.testing.assert_close(found, wanted)
