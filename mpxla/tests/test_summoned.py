"""Blocks of `model.summon_full_params()`: every rank reads, calls and writes the whole model."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import mpxla as smp
from mpxla.errors import MpxlaError, RankMismatch, StepError
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STAGES = {"pipeline_parallel_degree": 2}
SHARED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10}
SHARED |= {"sdp_gradient_clipping": 1e6}
SPLIT = {"ddp": True, "tensor_parallel_degree": 2}
DIVIDED = {"ddp": True, "shard_optimizer_state": True}
NUM_STEPS = 3


class Net(nn.Module):
    """With layers that can be split, a tied weight, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.second, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight, self.last = self.second.weight, nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.zeros(4), persistent=False)

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x)))
        h = torch.tanh(self.tied(torch.tanh(self.second(h))))
        return self.last(h) * self.scale + self.shift


def batch(number):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def edit(module, number):
    """Writes in each way, and reads what is written."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.3 - 0.1 * number, 0.3)
        module.second.weight.data *= 1.1
        module.last.bias.data = module.last.bias.data + 0.5
        module.scale *= 0.9
        module.shift += 0.25
        module.first.bias.requires_grad_(number > 0)
        module.eval()
        score = module(batch(99)).sum().item()
        module.train()
    return score, sum(p.square().sum().item() for p in module.parameters())


def wrapped(config):
    smp.init({"microbatches": 2, **config})
    net = Net()
    if "tensor_parallel_degree" in config:
        for layer in (net.first, net.last):
            smp.set_tensor_parallelism(layer)
    model = smp.DistributedModel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    def train(number):
        optimizer.zero_grad()
        loss = step(model, batch(number)).reduce_mean().item()
        optimizer.step()
        return loss

    return model, train


def trained(config):
    model, train = wrapped(config)
    found = []
    for number in range(NUM_STEPS):
        found.append(train(number))
        with model.summon_full_params() as module:
            found += edit(module, number)
            inside = host(model.state_dict().items())
        with model.summon_full_params(writeback=False) as module:
            for parameter in module.parameters():
                nn.init.uniform_(parameter)
        close(host(model.state_dict().items()), inside)
    return found, host(model.state_dict().items())


@pytest.mark.parametrize(
    "config, num_ranks",
    [
        (STAGES, 2),
        (SHARED, 2),
        (SPLIT, 2),
        pytest.param(DIVIDED, 2, marks=pytest.mark.slow),
        pytest.param(STAGES | SHARED, 4, marks=pytest.mark.slow),
        pytest.param(STAGES | SPLIT, 4, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_trains_with_what_is_written(config, num_ranks):
    model, expected = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, x) / 2 for x in batch(number).chunk(2))
        loss.backward()
        optimizer.step()
        expected += [loss.item(), *edit(model, number)]
    for found, state in run_ranks(trained, num_ranks, config):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        close(state, host(model.state_dict().items()))


def pruned(module):
    """A fifth of all weights in layers of both stages, by their size."""
    places = [(module.first, "weight"), (module.last, "weight")]
    prune.global_unstructured(places, prune.L1Unstructured, amount=0.2)


def copies(config):
    model, train = wrapped(config)
    with model.summon_full_params() as module:
        assert module.last.weight.shape == (4, 16)  # before the first step
    train(0)
    with model.summon_full_params() as module:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        others = copy.deepcopy(module), torch.load(file, weights_only=False)
        score = module(batch(1)).tolist()
        assert [other(batch(1)).tolist() for other in others] == [score, score]
        assert model(batch(1)).tolist() == score
        pruned(module)
    losses = [train(1), train(2)]
    return losses, host(model.state_dict().items())


@pytest.mark.parametrize("config", [STAGES, SHARED], ids=["stages", "shared"])
def test_copies_and_prunes(config):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, x) / 2 for x in batch(number).chunk(2))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        if number == 0:
            pruned(model)
    for losses, state in run_ranks(copies, 2, config):
        assert losses == pytest.approx(expected[1:], rel=1e-4)
        close(state, host(model.state_dict().items()))


def taken_out():
    """A copy from a file, and the module itself afterwards."""
    model, train = wrapped(SHARED)
    train(0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    state = model.state_dict()
    model.cpu()
    return [host(m.state_dict().items()) for m in (read, model.module)], host(state.items())


@pytest.mark.slow
def test_divided_models_are_saved_whole_and_taken_out():
    for taken, state in run_ranks(taken_out, 2):
        assert len(state) == 11
        for values in taken:
            close(values, state)


def read_with_statistics():
    """Norms of what is read, and whether replicas keep statistics of their own."""
    smp.init({"microbatches": 2, "ddp": True})
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = smp.DistributedModel(net, broadcast_buffers=False)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, batch(smp.rank()))
    before = net[1].running_mean.tolist()
    with model.summon_full_params() as module:
        norm = sum(p.norm().item() for p in module.parameters())
        module[1].running_var.mul_(2)
        scale = module[1].running_var.tolist()
    assert net[1].running_var.tolist() == scale
    return norm, before, net[1].running_mean.tolist()


@pytest.mark.slow
def test_replicas_keep_buffers_of_their_own():
    (norm, *first), (other, *second) = run_ranks(read_with_statistics, 2)
    assert norm == other
    assert first[0] == first[1] and second[0] == second[1] and first != second


def grown(config):
    model, train = wrapped(config)
    train(0)
    torch.manual_seed(1)
    model.module.last = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    with model.summon_full_params() as module:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.last.parameters():
                parameter += 0.5
    between = host(model.state_dict().items())
    train(1)  # the optimizer does not have them
    return before, between, host(model.state_dict().items())


@pytest.mark.parametrize("config", [STAGES, SHARED], ids=["stages", "shared"])
def test_layers_that_were_put_into_the_model_since_its_last_step(config):
    torch.manual_seed(1)
    head = nn.Linear(16, 4)
    for before, *states in run_ranks(grown, 2, config):
        torch.testing.assert_close(before["last.0.weight"], head.weight.detach())
        torch.testing.assert_close(before["last.1.running_mean"], torch.zeros(4))
        for state in states:
            torch.testing.assert_close(state["last.0.weight"], head.weight.detach() + 0.5)
            torch.testing.assert_close(state["last.1.weight"], torch.full((4,), 1.5))
        torch.testing.assert_close(states[0]["first.weight"], before["first.weight"])


def with_computed_weights():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), torch.nn.utils.weight_norm(nn.Linear(16, 4)))


def computed_weights():
    """`weight_norm` leaves a tensor in an attribute that is computed of divided parameters."""
    smp.init({"microbatches": 2, **SHARED})
    plain, model = with_computed_weights(), smp.DistributedModel(with_computed_weights())
    train = smp.step(lambda model, x: model.backward(model(x).square().mean()))
    for _ in range(2):
        train(model, batch(0))
    with model.summon_full_params() as module, torch.no_grad():
        module[1].weight_v.mul_(2)
        for net in (module, plain):
            net[1].weight_g.mul_(3)
        names = [name for name, _ in module.named_parameters()]
        return module(batch(1)), plain(batch(1)), names


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_of_divided_ones_are_computed_anew():
    for called, expected, names in run_ranks(computed_weights, 2):
        close(called, expected)
        assert set(names) == {"0.weight", "0.bias", "1.weight_g", "1.weight_v", "1.bias"}


def mistakes():
    model, train = wrapped(SHARED)
    train(0)
    before = model.state_dict()
    texts = []
    for kind, mistake in (
        (StepError, lambda module: train(1)),
        (StepError, lambda module: model.load_state_dict(before)),
        (StepError, lambda module: loss_of(module, batch(1)).backward()),
        (ValueError, lambda module: int("x")),
        (RankMismatch, lambda module: module.last.bias.data.fill_(smp.rank())),
        (RankMismatch, lambda module: smp.rank() and module.last.bias.data.fill_(5)),
    ):
        with pytest.raises(kind) as caught, model.summon_full_params() as module:
            mistake(module)
        texts.append(str(caught.value))
        assert model.module.first.weight.is_meta
    return texts


def test_mistakes_are_told():
    for step, load, gradient, _, differing, alone in run_ranks(mistakes, 2):
        assert "was called in a block of model.summon_full_params()" in step
        assert "Call it after the block" in load
        assert "first.weight has got a gradient in model.summon_full_params()" in gradient
        assert "have written other values in model.summon_full_params()" in differing
        assert "last.bias" in differing
        assert "nothing" in alone


def masters():
    model, train = wrapped(SHARED | {"bf16": True})
    train(0)
    (optimizer,) = model.optimizers
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in held]
    with model.summon_full_params() as module, torch.no_grad():
        assert module.second.weight.dtype == torch.bfloat16
        module.second.weight[3, 5] = 0.125
    changed = [(p, p != old) for p, old in zip(held, before, strict=True)]
    assert {p.dtype for p in held} == {torch.float32}
    return [p[where].tolist() for p, where in changed if where.any()]


def test_masters_keep_what_is_not_written():
    assert sorted(run_ranks(masters, 2)) == [[], [[0.125]]]


def delayed():
    smp.init(STAGES)
    with smp.delay_param_initialization():
        net = nn.Linear(256, 256)
    model = smp.DistributedModel(net)
    with pytest.raises(MpxlaError) as caught, model.summon_full_params():
        pass
    return str(caught.value)


def test_needs_values():
    for text in run_ranks(delayed, 2):
        assert "model.summon_full_params() was called before the first step" in text
