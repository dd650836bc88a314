"""Updates in several programs, which let go of old values in between, against plain optimizers."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpxla.device.eager import EagerBackend
from mpxla.parallel.updates import parts as update_parts
from mpxla.parallel.updates.parts import UpdateInParts
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.tests.parallel.updates.test_update import LAZY, OPTIMIZERS
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.unit

SHAPES = [(8, 5), (6, 4), (), (7, 9)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(update_parts, "PART_BYTES", 100)


class ByTheirNorm(torch.optim.Optimizer):
    """Every step is as long as the others: all parameters depend on all gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        norm = sum((p.grad.square().sum() for p in trained), torch.zeros(())).sqrt()
        for p in trained:
            p.sub_(group["lr"] * p.grad / norm)


def started(make):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return parameters, make(parameters)


def compiled(make):
    parameters, optimizer = started(make)
    backend = EagerBackend()
    return parameters, optimizer, backend, CompiledUpdate(optimizer, backend)


def train(parameters, step, numbers):
    for number in numbers:
        torch.manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        step()


def parts_of(update):
    (program,) = update._programs.values()
    return program._parts


@pytest.mark.parametrize(
    "name",
    [
        *("SGD momentum", "Adam amsgrad"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("NAdam", "RMSprop", "Adafactor")),
    ],
)
def test_parts_give_the_values_of_the_optimizer(name):
    plain, optimizer = started(OPTIMIZERS[name])
    train(plain, optimizer.step, range(4))
    found, ours, _, update = compiled(OPTIMIZERS[name])
    train(found, update.step, range(4))
    assert len(parts_of(update)) > 1, "each parameter with its state, and numbers with the first"
    torch.testing.assert_close(found, plain)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(dict(ours.state[one]), dict(optimizer.state[other]))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def test_what_a_part_has_replaced_is_gone_when_the_next_one_starts(monkeypatch):
    parameters, optimizer, backend, update = compiled(adamw)
    train(parameters, update.step, range(2))
    state = [optimizer.state[p] for p in parameters]
    old = [
        [StorageWeakRef(t.untyped_storage()) for t in (p, s["exp_avg"], s["exp_avg_sq"])]
        for p, s in zip(parameters, state, strict=True)
    ]
    gone = []
    monkeypatch.setattr(
        backend, "wait", lambda: gone.append(sum(ref.expired() for refs in old for ref in refs))
    )
    train(parameters, update.step, [2])
    numbers = [len(outputs) for _, _, outputs in parts_of(update)]
    assert len(numbers) == 3 and gone == [sum(numbers[:1]) - 1, sum(numbers[:2]) - 1]  # the count


def test_views_follow_and_gradients_stay():
    parameters, _, _, update = compiled(adamw)
    train(parameters, update.step, range(1))
    views = [p.detach() for p in parameters]
    train(parameters, update.step, [1])
    for parameter, view in zip(parameters, views, strict=True):
        assert torch.equal(parameter, view)
        assert parameter.grad is not None


def test_everything_has_a_value_after_a_part_that_fails():
    parameters, optimizer, _, update = compiled(adamw)
    train(parameters, update.step, range(2))
    before = [p.detach().clone() for p in parameters]
    count = optimizer.state[parameters[0]]["step"].item()
    parts = parts_of(update)
    _, inputs, outputs = parts[1]

    def fail(arguments):
        raise MemoryError

    parts[1] = fail, inputs, outputs
    with pytest.raises(MemoryError):
        train(parameters, update.step, [2])
    changed = [not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)]
    assert changed == [True, False, True, False]
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        assert state["step"].item() == count, "later parts would have counted again"


def test_an_update_of_which_all_depends_on_all_is_one_program():
    plain, optimizer = started(ByTheirNorm)
    train(plain, optimizer.step, range(2))
    found, _, _, update = compiled(ByTheirNorm)
    train(found, update.step, range(2))
    (program,) = update._programs.values()
    assert not isinstance(program, UpdateInParts)
    torch.testing.assert_close(found, plain)


def test_an_update_that_draws_numbers_is_not_compiled():
    plain, optimizer = started(OPTIMIZERS["Noisy"])
    train(plain, optimizer.step, range(2))
    found, _, _, update = compiled(OPTIMIZERS["Noisy"])
    train(found, update.step, range(2))
    assert update.reason == LAZY["Noisy"]
    torch.testing.assert_close(found, plain)


def test_a_small_update_is_one_program(monkeypatch):
    monkeypatch.undo()
    parameters, _, _, update = compiled(adamw)
    train(parameters, update.step, range(1))
    (program,) = update._programs.values()
    assert not isinstance(program, UpdateInParts)


def train_divided(config, part_bytes):
    """Runs on every rank: parameters after some steps, and how many parts an update has."""
    import mpxla as smp

    update_parts.PART_BYTES = part_bytes
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    )
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01))

    @smp.step
    def step(model, x):
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    for number in range(3):
        torch.manual_seed(number)
        optimizer.zero_grad()
        step(model, torch.randn(4, 8))
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    counts = [len(getattr(p, "_parts", [0])) for p in optimizer._update._programs.values()]
    smp.shutdown()
    return state, counts


@pytest.mark.ranks
@pytest.mark.parametrize(
    "config", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=["float32", "bf16"]
)
def test_training_in_parts_is_training(config):
    """On torch_xla, which takes no memory of arguments."""
    env = {"MPXLA_DEVICE": "torch_xla"}
    (whole, one), (parted, several) = (
        run_ranks(train_divided, 1, config, size, env=env)[0] for size in (1 << 30, 100)
    )
    assert max(one) == 1 and min(several) > 1
    torch.testing.assert_close(parted, whole, rtol=0, atol=0)
