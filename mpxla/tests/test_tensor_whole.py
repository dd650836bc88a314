"""What scripts do with a whole model works with tensors that are split over ranks."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpxla as smp
from mpxla.tests.checkpoint.test_parts import SplitNet
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
EMA = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}
TP = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, "microbatches": 2}


def batch(number):
    return torch.randint(12, (4, 2), generator=torch.Generator().manual_seed(number))


def loss_of(model, ids):
    return torch.nn.functional.cross_entropy(model(ids[:, 0]), ids[:, 1])


def raw():
    torch.manual_seed(4)
    return SplitNet()


def train_plainly(model, averaged=None, counts=(NUM_STEPS,)):
    """Replicas that have no batch any more give zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(max(counts)):
        optimizer.zero_grad()
        for replica, count in enumerate(counts):
            if number < count:
                (loss_of(model, batch(10 * replica + number)) / len(counts)).backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(model)


def wrapped(**keys):
    """A model whose layers are split, and its optimizer, on this rank."""
    smp.init({**TP, **keys})
    module = raw()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    return model, optimizer


def train(path):
    model, optimizer = wrapped()
    averaged = AveragedModel(model, **EMA)

    @smp.step
    def step(model, ids):
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model, ids):
        return loss_of(model, ids)

    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        step(model, batch(number))
        optimizer.step()
        averaged.update_parameters(model)
    of_average = evaluate(averaged, batch(9)).reduce_mean().item()
    early = copy.deepcopy(model)
    early.load_state_dict(raw().state_dict())
    of_early = evaluate(early, batch(9)).reduce_mean().item()
    smaller = {**raw().state_dict(), "first.weight": torch.zeros(16, 8)}  # the shape of a part
    for target in (model, early):
        with pytest.raises(RuntimeError, match=r"size mismatch for first.weight: .*\[32, 8\]"):
            target.load_state_dict(smaller)
    split = sorted(model.shards_of_tensors)
    named = dict(model.module.named_parameters())
    assert [n for n, p in named.items() if model.is_distributed_parameter(p)] == [
        n for n in named if n in split
    ]
    assert {type(m).__name__ for m in model.distributed_modules()} >= {"RowLinear"}
    assert len(list(model.scaled_batch_reducer_named_parameters())) == len(named)
    torch.save(model.module, f"{path}/{smp.rank()}")
    state = averaged.module.state_dict()
    model.cpu()
    return of_average, of_early, state, copy.deepcopy(model.module)


def test_copies_averages_and_whole_modules(tmp_path):
    model = raw()
    averaged = AveragedModel(model, **EMA)
    train_plainly(model, averaged)
    expected = loss_of(averaged, batch(9)).item()
    for rank, found in enumerate(run_ranks(train, 2, str(tmp_path))):
        of_average, of_early, state, on_host = found
        assert of_average == pytest.approx(expected, rel=1e-5)
        assert of_early == pytest.approx(loss_of(raw(), batch(9)).item(), rel=1e-5)
        assert_close_by_norm(state, averaged.module.state_dict(), 1e-5)
        saved = torch.load(f"{tmp_path}/{rank}", weights_only=False)
        for whole in (on_host, saved):  # plain modules that compute by themselves
            assert type(whole.first) is torch.nn.Linear and whole.first.out_features == 32
            assert_close_by_norm(whole.state_dict(), model.state_dict(), 1e-5)
            torch.testing.assert_close(
                loss_of(whole, batch(9)), loss_of(model, batch(9)), rtol=1e-5, atol=1e-6
            )


def penalized(model, ids):
    """A head that reads the table of the embedding, and penalties on all parameters."""
    net = getattr(model, "module", model)
    loss = loss_of(model, ids) + sum(p.abs().sum() / p.numel() for p in model.parameters())
    return loss + 0.1 * torch.nn.functional.linear(net.words(ids[:, 0]), net.words.weight).var()


def train_penalized(stages):
    model, optimizer = wrapped(pipeline_parallel_degree=stages)

    @smp.step
    def step(model, ids):
        loss = penalized(model, ids)
        model.backward(loss)
        return loss

    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).reduce_mean().item())
        optimizer.step()
    return losses, model.state_dict(), sorted(model.shards_of_tensors)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_outside_of_their_layers(stages):
    model = raw()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    expected = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        halves = [penalized(model, ids) / 2 for ids in batch(number).chunk(2)]
        sum(halves).backward()
        expected.append(sum(halves).item())
        optimizer.step()
    for losses, state, split in run_ranks(train_penalized, 2 * stages, stages):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "words.weight" in split and "first.weight" in split
        assert_close_by_norm(state, model.state_dict(), 1e-5)


def train_unevenly(counts):
    model, optimizer = wrapped()

    @smp.step
    def step(model, ids):
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    replica = smp.rdp_rank()
    with model.join():
        for number in range(counts[replica]):
            optimizer.zero_grad()
            step(model, batch(10 * replica + number))
            optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_replicas_with_different_numbers_of_batches():
    model, counts = raw(), (3, 1)
    train_plainly(model, counts=counts)
    for state in run_ranks(train_unevenly, 4, counts):
        assert_close_by_norm(state, model.state_dict(), 1e-5)
