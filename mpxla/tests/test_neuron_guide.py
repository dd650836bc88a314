"""Each line of `docs/neuron.md`, run on two replicas, and the page's list of these tests."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS = 4
BATCH = 4


@smp.step
def train_step(model, inputs, targets):
    hidden = model[0](inputs) if isinstance(model, nn.Sequential) else model.get_module()[0](inputs)
    loss = nn.functional.mse_loss(model(inputs), targets)
    model.backward(loss)
    return loss, hidden


def make_model():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(rank):
    """What a replica reads: inputs [BATCH, 3] and targets [BATCH, 1]."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(BATCH, 3, generator=generator)
        yield inputs, inputs.sum(dim=1, keepdim=True)


def recipes(folder):
    """The lines of the page in the order of a script; returns what each row promises."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.runtime as xr

    smp.init({"ddp": True, "microbatches": 2})
    seen = {
        "device": (xr.device_type(), torch_xla.device().type),
        "ranks": (smp.rank(), smp.size(), xr.global_ordinal(), xr.world_size()),
    }
    torch.manual_seed(smp.rank())  # other values on each rank
    model = make_model()
    seen["own"] = model[0].weight.tolist()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    loaded, losses, closed, compilations = [], [], [], []
    loader = pl.MpDeviceLoader(
        list(batches(smp.rank())), torch_xla.device(), batches_per_execution=2
    )
    for number, (inputs, targets) in enumerate(loader):
        loaded.append(inputs.cpu())
        optimizer.zero_grad()
        loss, hidden = train_step(model, inputs, targets)
        if number == 0:
            seen["start"] = {name: value.cpu() for name, value in model.state_dict().items()}
            seen["hidden"] = hidden.concat().cpu()
        if number % 2:
            xm.optimizer_step(optimizer)
            xm.mark_step()
        else:
            optimizer.step()
        xm.add_step_closure(lambda value: closed.append(value.item()), args=(loss.reduce_mean(),))
        torch_xla.sync()
        losses.append(loss.reduce_mean().item())
        compilations.append(met.metric_data("CompileTime")[0])
    seen |= {"loaded": loaded, "losses": losses, "closed": closed, "compilations": compilations}

    state = model.state_dict()
    if smp.rank() == 0:
        torch.save(state, folder / "weights.pt")
    seen["state"] = {name: value.cpu() for name, value in state.items()}
    smp.save_checkpoint(folder / "checkpoint", "last", model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    smp.resume_from_checkpoint(folder / "checkpoint")
    seen["restored"] = {name: value.cpu() for name, value in model.state_dict().items()}

    plain = make_model()
    plain.load_state_dict(seen["start"])
    plain.backward = torch.Tensor.backward
    loss, _ = train_step.__wrapped__(plain, *next(iter(batches(smp.rank()))))
    seen["undecorated"] = loss.item()
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("neuron")


@pytest.fixture(scope="module")
def seen(folder):
    """What the two ranks saw."""
    return run_ranks(recipes, 2, folder, timeout_s=240)


def plain_losses(start):
    """Losses of each replica's batches while one process trains on the batches of both."""
    model = make_model()
    model.load_state_dict(copy.deepcopy(start))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ([], [])
    for pair in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in pair]
        torch.stack(losses).mean().backward()
        optimizer.step()
        for own, loss in zip(found, losses, strict=True):
            own.append(loss.item())
    return found, model.state_dict()


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_a_script_runs_on_the_cpu(seen):
    assert [rank["device"] for rank in seen] == [("CPU", "xla")] * 2


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_ranks(seen):
    assert [rank["ranks"] for rank in seen] == [(0, 2, 0, 2), (1, 2, 1, 2)]


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_equal_initial_weights(seen):
    first, second = seen
    assert first["own"] != second["own"]
    for rank in seen:
        assert rank["start"]["0.weight"].tolist() == first["own"]


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_device_loader(seen):
    for number, rank in enumerate(seen):
        expected = [inputs for inputs, _ in batches(number)]
        assert torch.equal(torch.stack(rank["loaded"]), torch.stack(expected))


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_losses_are_those_of_one_process(seen):
    expected, state = plain_losses(seen[0]["start"])
    for rank, losses in zip(seen, expected, strict=True):
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(rank["state"], dict(state))


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_step_closures(seen):
    for rank in seen:
        assert rank["closed"] == rank["losses"]


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_printing_tensors(seen):
    for number, rank in enumerate(seen):
        inputs, _ = next(iter(batches(number)))
        start = rank["start"]
        expected = inputs @ start["0.weight"].T + start["0.bias"]
        torch.testing.assert_close(rank["hidden"], expected)


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_compilations(seen):
    for rank in seen:
        assert rank["compilations"][0] > 0
        assert len(set(rank["compilations"][2:])) == 1, rank["compilations"]


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_saving(seen, folder):
    weights = torch.load(folder / "weights.pt", map_location="cpu")
    torch.testing.assert_close(dict(weights), seen[0]["state"], rtol=0, atol=0)


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_serialization(seen):
    for rank in seen:
        torch.testing.assert_close(rank["restored"], rank["state"], rtol=0, atol=0)


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_undecorated_step(seen):
    for rank in seen:
        assert rank["undecorated"] == pytest.approx(rank["losses"][0], rel=1e-5)


def functions_of(path):
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.unit
def test_every_row_names_its_tests():
    page = (REPOSITORY / "docs" / "neuron.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    named = set()
    for row in rows:
        cell = row.strip("| ").split(" | ")[-1]
        other = re.search(r" in `([\w/]+\.py)`$", cell)
        tests = re.findall(r"`(test_\w+)`", cell)
        assert tests, row
        if other is not None:
            assert tests[-1] in functions_of(REPOSITORY / other[1]), row
            tests.pop()
        assert set(tests) <= functions_of(Path(__file__)), row
        named |= set(tests)
    own = {name for name in functions_of(Path(__file__)) if name.startswith("test_")}
    assert named == own - {"test_every_row_names_its_tests"}
