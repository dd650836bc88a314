"""Shares of parameters and of optimizer state; parity is tested in `test_parity_replicas`."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CheckpointError
from mpxla.parallel.gradients.buckets import Bucket
from mpxla.parallel.updates.pieces import cut_state, join_states
from mpxla.parallel.updates.zero import ranges_of
from mpxla.stage.spec import TensorSpec
from mpxla.tests.ranks.run import run_ranks

F32 = torch.float32


def bucket(parts, *shapes):
    names = tuple("abcdefg"[: len(shapes)])
    return Bucket(names, tuple(TensorSpec(shape, F32) for shape in shapes), (0,), parts)


@pytest.mark.unit
def test_shards_are_equal_and_cover_every_element_once():
    whole = bucket(3, (2, 3), (4,), ())
    assert whole.num_elements == 12, "11 and padding"
    assert [ranges_of(whole, i) for i in range(3)] == [
        {"a": (0, 4)},
        {"a": (4, 6), "b": (0, 2)},
        {"b": (2, 4), "c": (0, 1)},
    ]


@pytest.mark.unit
def test_a_small_bucket_leaves_replicas_without_a_piece():
    small = bucket(4, (2,))
    assert [ranges_of(small, i) for i in range(4)] == [{"a": (0, 1)}, {"a": (1, 2)}, {}, {}]


@pytest.mark.unit
def test_state_is_cut_and_joined():
    full = {
        0: {"step": torch.tensor(3.0), "avg": torch.arange(6.0).view(2, 3), "factor": 0.5},
        2: {"step": torch.tensor(3.0), "avg": torch.tensor(7.0), "factor": 0.25},
    }
    first = {0: cut_state(full[0], (2, 3), 0, 2)}
    second = {0: cut_state(full[0], (2, 3), 2, 6), 2: cut_state(full[2], (), 0, 1)}
    assert first[0]["avg"].tolist() == [0, 1]
    assert second[0]["avg"].tolist() == [2, 3, 4, 5]
    assert second[0]["factor"] == 0.5
    ranges = ({0: ((0, 2), (2, 3))}, {0: ((2, 6), (2, 3)), 2: ((0, 1), ())})
    joined = join_states([(second, ranges[1]), (first, ranges[0])])
    assert list(joined) == [0, 2]
    for position, state in full.items():
        assert joined[position]["factor"] == state["factor"]
        for key in ("step", "avg"):
            assert torch.equal(joined[position][key], state[key]), key


@pytest.mark.unit
def test_an_incomplete_set_of_pieces_is_no_state():
    full = {"step": torch.tensor(3.0), "avg": torch.arange(6.0).view(2, 3)}
    middle = ({0: cut_state(full, (2, 3), 2, 4)}, {0: ((2, 4), (2, 3))})
    first = ({0: cut_state(full, (2, 3), 0, 2)}, {0: ((0, 2), (2, 3))})
    last = ({0: cut_state(full, (2, 3), 4, 6)}, {0: ((4, 6), (2, 3))})
    text = r"'avg' of parameter 0, of shape \[2, 3\], is not complete: of 6 elements there are "
    with pytest.raises(CheckpointError, match=text + "0 to 2, 4 to 6"):
        join_states([first, last])
    with pytest.raises(CheckpointError, match=text + "0 to 2"):
        join_states([first])
    with pytest.raises(CheckpointError, match=text + "2 to 4"):
        join_states([middle, middle])  # one rank's, given twice
    without = ({0: {"step": torch.tensor(3.0)}}, last[1])
    with pytest.raises(CheckpointError, match=text + "0 to 2, 2 to 4"):
        join_states([first, middle, without])
    assert torch.equal(join_states([last, first, middle])[0]["avg"], full["avg"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def start(stages=1, kind=torch.optim.Adam, **options):
    smp.init(
        {"ddp": True, "shard_optimizer_state": True, "pipeline_parallel_degree": stages, **options}
    )
    torch.manual_seed(3)
    model = smp.DistributedModel(Net())
    return model, smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))


def inputs(number):
    torch.manual_seed(10 * number + smp.rdp_rank())
    return torch.randn(4, 5)


def updated(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        train(model, inputs(number))
        optimizer.step()
    return model.state_dict()


def resume(how, stages):
    """Trains 4 steps; again 2, saved and loaded in another way, and 2 more."""
    model, optimizer = start(stages)
    expected = updated(model, optimizer, range(4))
    smp.shutdown()
    model, optimizer = start(stages)
    updated(model, optimizer, range(2))
    weights = model.state_dict()
    gathered = optimizer.local_state_dict(gather_if_shard=how != "share")
    state = optimizer.state_dict() if how == "full" else gathered
    sizes = [v["exp_avg"].numel() for v in optimizer.local_state_dict(False)["state"].values()]
    smp.shutdown()
    model, optimizer = start(stages)
    if how == "share":
        train(model, inputs(0))  # loading before and after partitioning
        optimizer.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    found = updated(model, optimizer, range(2, 4))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return sizes, state


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "stages"),
    [
        pytest.param("full", 1, marks=pytest.mark.slow),
        pytest.param("partial", 2, marks=pytest.mark.slow),
        ("share", 2),
    ],
)
@pytest.mark.slow
def test_training_resumes_from_gathered_and_from_own_state(how, stages):
    results = run_ranks(resume, 2 * stages, how, stages)
    assert sum(sum(sizes) for sizes, _ in results) == 5 * 7 + 7 + 7 * 3 + 3
    if how == "full":
        plain = Net()
        optimizer = torch.optim.Adam(plain.parameters())
        optimizer.load_state_dict(results[0][1])
        plain(torch.ones(1, 5)).sum().backward()
        optimizer.step()


def save_in_between(path):
    model, optimizer = start()
    updated(model, optimizer, range(2))
    smp.save_checkpoint(path, "half", model=model, optimizer=optimizer)
    return updated(model, optimizer, range(2, 4))


def resume_from_file(path, is_sharded):
    smp.init({"ddp": True, "shard_optimizer_state": is_sharded})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    smp.resume_from_checkpoint(path, "half")
    return updated(model, optimizer, range(2, 4))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("is_sharded", [True, False])
def test_checkpoints_hold_whole_state(tmp_path, is_sharded):
    expected = run_ranks(save_in_between, 2, str(tmp_path))[0]
    for found in run_ranks(resume_from_file, 2, str(tmp_path), is_sharded):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def train_with_two_optimizers(kind):
    """Also state that exists before the model is divided (Adagrad), and new weights in between."""
    smp.init({"ddp": True, "shard_optimizer_state": True})
    torch.manual_seed(3)
    raw = Net()
    inner = [kind(part.parameters(), lr=0.1) for part in (raw.first, raw.second)]
    model = smp.DistributedModel(raw)
    optimizers = [smp.DistributedOptimizer(one) for one in inner]
    for number in range(3):
        model.zero_grad()
        train(model, inputs(number))
        for optimizer in optimizers:
            optimizer.step()
        if number == 0:
            model.load_state_dict({n: v + 0.5 for n, v in model.state_dict().items()})
    for parameter in raw.parameters():
        parameter.grad = None
    assert all(held.grad is None for one in inner for g in one.param_groups for held in g["params"])
    return model.state_dict()


@pytest.mark.ranks
def test_several_optimizers_and_weights_loaded_in_between():
    kind = torch.optim.Adagrad
    found = run_ranks(train_with_two_optimizers, 2, kind)[0]
    torch.manual_seed(3)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        batches = []
        for replica in range(2):
            torch.manual_seed(10 * number + replica)
            batches.append(torch.randn(4, 5))
        model(torch.cat(batches)).square().mean().backward()
        optimizer.step()
        if number == 0:
            model.load_state_dict({n: v + 0.5 for n, v in model.state_dict().items()})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.Linear(64, 64)

    def forward(self, x):
        return self.big(x)


def use_whole_tensors():
    smp.init({"ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(Wide())
    try:
        smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
    except smp.ConfigError as error:
        return str(error)


@pytest.mark.ranks
def test_what_cannot_be_divided_is_refused():
    for found in run_ranks(use_whole_tensors, 2):
        assert "and Adafactor needs whole tensors" in found
