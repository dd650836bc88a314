"""Step functions that write to parameters train as in PyTorch: the same losses and parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def max_norm(model, x):
    """As EEGNet does it."""
    model.first.weight.data = torch.renorm(model.first.weight.data, p=2, dim=0, maxnorm=0.3)
    return model.last(torch.tanh(model.first(x)))


def normalized(model, x):
    """As prototypes and cosine heads do it, and layers that are not to be negative."""
    with torch.no_grad():
        model.last.weight.copy_(F.normalize(model.last.weight, dim=1))
        model.first.bias.clamp_(min=0)
        model.first.weight.data[0].zero_()
    model.first.weight.data.div_(model.first.weight.norm())
    return model.last(torch.tanh(model.first(x)))


def decayed(model, x):
    """No two microbatches have the same weights."""
    model.first.weight.data.mul_(0.8)
    model.last.weight.data *= 0.9
    torch.mul(model.last.bias.data, 0.9, out=model.last.bias.data)
    return model.last(torch.tanh(model.first(x)))


def binary(model, x):
    """The first layer's full weights come back when the backward has been called."""
    model.full = model.first.weight.data
    model.first.weight.data = model.full.sign() * model.full.abs().mean()
    mixed = F.linear(x, model.full) + model.first(x) + model.first.weight.T.sum(1)
    return model.last(torch.tanh(mixed))


def at_places(model, x):
    """And by functions that take the tensor otherwise."""
    model.first.weight.data[model.first.weight.data.abs() < 0.1] = 0
    with torch.no_grad():
        model.last.weight[0] = 0.5
        model.last.bias[:2] += 0.1
        nn.init.constant_(model.first.bias[2:], 0.3)
        torch._foreach_mul_(list(model.last.parameters()), 0.9)
    return model.last(torch.tanh(model.first(x)))


def exchanged(model, x):
    first = model.first.weight.data
    model.first.weight.data, model.last.weight.data = model.last.weight.data, first
    return model.last(torch.tanh(model.first(x)))


def momentum(model, x):
    """A frozen copy follows a layer, as in MoCo."""
    with torch.no_grad():
        for slow, fast in zip(model.slow.parameters(), model.last.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
    y = torch.tanh(model.first(x))
    return model.last(y) * model.slow(y)


def twice(model, x):
    """Siamese: the second call writes what the first has left."""
    return max_norm(model, x) * max_norm(model, x + 1)


def again(model, x):
    """What is computed again is not written again, as PyTorch would do."""
    return checkpoint(decayed, model, x, use_reentrant=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ (2 * weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


def tied(model, x):
    model.last.weight.data.clamp_(-0.2, 0.2)
    y = torch.tanh(model.first(x))
    model.tied.weight.data.mul_(0.9)
    return model.tied(y) + model.last(y)


def own_backward(model, x):
    model.first.weight.data = model.first.weight.data.clamp(-0.2, 0.2)
    return model.last(torch.tanh(Double.apply(x, model.first.weight)))


def by_batch(model, x):
    """The new value depends on the inputs."""
    y = torch.tanh(model.first(x))
    model.last.bias.data.lerp_(y.detach().mean(0), 0.1)
    return model.last(y)


def restored(model, x):
    """Derivatives read what autograd has kept: of a convolution, the parameter as it is then."""
    for layer in (model.filters, model.first):
        full = layer.weight.data.clone()
        layer.weight.data = full.sign() * full.abs().mean()
        x = torch.tanh(model.last(x))
        x = layer(x[:, None]).mean(1) if layer is model.filters else layer(x)
        layer.weight.data = full
    model.filters.weight.data.mul_(0.9)
    return x


def written_after(model, x):
    """Hebbian, and a limit that comes after the use."""
    y = torch.tanh(model.last(x))
    z = model.first(y)
    model.first.weight.data += 0.1 * z.detach().t() @ y.detach()
    model.last.weight.data.clamp_(-0.3, 0.3)
    return z


INSTEAD = {again: decayed}
FUNCTIONS = [max_norm, normalized, decayed, binary, at_places, exchanged, momentum, twice]
FUNCTIONS += [again, own_backward, tied]
BY_BATCH = [by_batch, written_after]
QUICK = [max_norm, written_after]
ALL = [*FUNCTIONS, restored, *BY_BATCH]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.slow = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.last.weight
        self.filters = nn.Conv1d(1, 2, 3, padding=1)
        self.slow.requires_grad_(False)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def batch_of(number):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


STEPS, MICROBATCHES = 3, 2


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def restore(model):
    model = getattr(model, "module", model)
    if hasattr(model, "full"):
        model.first.weight.data = model.full


def expected(function, replicas=1):
    """Losses, gradients of the last step, and parameters before and after an evaluation."""
    model = Model(INSTEAD.get(function, function))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(number)
        for part in zip(*(x.chunk(MICROBATCHES) for x in x.chunk(replicas)), strict=True):
            loss = loss_of(model, torch.cat(part))
            (loss / MICROBATCHES).backward()
            restore(model)
            losses.append(loss.item())
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for x in batch_of(STEPS).chunk(MICROBATCHES):
            loss_of(model, x)
            restore(model)
    return losses, gradients, trained, model.state_dict()


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    restore(model)
    return loss


@smp.step
def evaluate(model, x):
    with torch.no_grad():
        loss = loss_of(model, x)
    restore(model)
    return loss


def train(config, functions, is_evaluated=True):
    smp.init({"microbatches": MICROBATCHES, **config})
    return [train_one(function, is_evaluated) for function in functions]


def train_one(function, is_evaluated):
    model = smp.DistributedModel(Model(function))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(number).chunk(smp.rdp_size())[smp.rdp_rank()]
        losses += [loss.item() for loss in train_step(model, x).outputs]
        optimizer.step()
    own = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    gradients = {n: g.cpu() for n, g in own.items() if g is not None}
    trained = {name: value.cpu() for name, value in model.state_dict().items()}
    if not is_evaluated:
        return losses, gradients, trained
    evaluate(model, batch_of(STEPS))
    return losses, gradients, trained, {n: v.cpu() for n, v in model.state_dict().items()}


def check(found, functions, replicas=1):
    for function, results in zip(functions, zip(*found, strict=True), strict=True):
        check_one(function.__name__, expected(function, replicas), results)


def check_one(name, wanted, results):
    def close(one, other):
        torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")

    losses, gradients, *states = wanted
    close(torch.tensor([one[0] for one in results]).mean(0), torch.tensor(losses))
    for _, own, *rest in results:
        close(own, {name: gradients[name] for name in own})
        close(rest, states[: len(rest)])


def test_one_rank():
    check(run_ranks(train, 1, {}, QUICK), QUICK)


@pytest.mark.slow
def test_other_writes():
    check(run_ranks(train, 1, {}, ALL, env={"MPXLA_DEVICE": "pjrt"}), ALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "functions"),
    [
        ({}, [*ALL[3::4], *BY_BATCH]),
        pytest.param({}, ALL, marks=pytest.mark.long),
        ({"optimize": "speed"}, ALL[::4]),
        ({"pipeline": "zero_bubble"}, ALL[1::4]),
        ({"virtual_pipeline_degree": 2}, FUNCTIONS[::4]),  # others are too few to be cut
        ({"auto_partition": False, "default_partition": 0}, ALL[2::4]),
    ],
    ids=lambda given: next(iter(given.values()), "") if isinstance(given, dict) else "",
)
def test_stages(config, functions):
    is_evaluated = not config
    config = {"pipeline_parallel_degree": 2, **config}
    check(run_ranks(train, 2, config, functions, is_evaluated), functions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "functions"),
    [
        ({}, FUNCTIONS[::3]),
        ({"shard_optimizer_state": True}, [*FUNCTIONS[1::3], restored]),
        ({"shard_gradients": True, "sdp_param_persistence_threshold": 4}, FUNCTIONS[2::3]),
    ],
    ids=lambda given: next(iter(given), "") if isinstance(given, dict) else "",
)
def test_replicas(config, functions):
    is_evaluated = not config
    found = run_ranks(train, 2, {"ddp": True, **config}, functions, is_evaluated)
    check(found, functions, replicas=2)


@pytest.mark.slow
def test_replicas_take_new_values_from_the_first():
    """Those that depend on the batch differ, until the step has ended."""
    first, second = run_ranks(train, 2, {"ddp": True}, BY_BATCH)
    for (_, _, trained, _), (_, _, other, _) in zip(first, second, strict=True):
        torch.testing.assert_close(trained, other, rtol=0, atol=0)


class BinaryLinear(nn.Linear):
    """As in BinaryNet: the full weights are an attribute of the parameter."""

    def forward(self, x):
        if x.shape[1] != 4:
            x.data = x.data.sign()
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        y = F.linear(x, self.weight)
        self.bias.org = self.bias.data.clone()
        y += self.bias.view(1, -1)
        return y


class BinaryNet(nn.Sequential):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__(BinaryLinear(4, 6), nn.Hardtanh(), BinaryLinear(6, 4))
        nn.init.uniform_(self[0].bias, 0.1, 0.4)


def train_binary(model, optimizer, step):
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch_of(number)))
        for parameter in model.parameters():
            if hasattr(parameter, "org"):
                parameter.data.copy_(parameter.org)
        optimizer.step()
        for parameter in model.parameters():
            if hasattr(parameter, "org"):
                parameter.org.copy_(parameter.data.clamp_(-1, 1))
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def binary_net(num_stages):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": num_stages})
    model = smp.DistributedModel(BinaryNet())
    model.module[0].weight.of_user = "kept"
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    found = train_binary(
        model, optimizer, lambda model, x: train_step(model, x).reduce_mean().item()
    )
    assert model.module[0].weight.of_user == "kept"
    return found


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_attributes_of_parameters(num_stages):
    def one_by_one(model, x):
        total = 0.0
        for part in x.chunk(MICROBATCHES):
            loss = loss_of(model, part) / MICROBATCHES
            loss.backward()
            total += loss.item()
        return total

    model = BinaryNet()
    losses, state = train_binary(model, torch.optim.Adam(model.parameters(), lr=0.1), one_by_one)
    for found, trained in run_ranks(binary_net, num_stages, num_stages):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
        torch.testing.assert_close(trained, state)


def computed_attribute(model, x):
    model.first.weight.scale = model.first.weight.data.abs().mean()
    return model.first(x)


def early_view(model, x):
    view = model.first.weight.t()
    model.first.weight.data.mul_(0.5)
    return x @ view


def unknown_use(model, x):
    y = x * torch.exp(model.first.weight).sum()
    model.first.weight.data = model.first.weight.data.clamp(-0.1, 0.1)
    return y


def shared_memory(model, x):
    model.last.weight.data = model.first.weight.data
    return model.last(x)


def refuse(functions):
    smp.init({"microbatches": MICROBATCHES})
    texts = []
    for function in functions:
        model = smp.DistributedModel(Model(function))
        with pytest.raises(smp.CaptureError) as error:
            train_step(model, batch_of(0))
        texts.append(str(error.value))
    return texts


def test_refused():
    functions = [computed_attribute, early_view, unknown_use, shared_memory]
    ((attribute, view, use, shared),) = run_ranks(refuse, 1, functions)
    assert "gives the parameter weight of a Linear a tensor as its attribute scale" in attribute
    assert "uses a view of a parameter that it has written to since it took the view at" in view
    assert "which of the two PyTorch's derivative would read: aten::exp in" in use
    assert "gives a parameter or buffer of shape [4, 4] the memory of another one" in shared


def refuse_divided():
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 4}
    smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
    with pytest.raises(smp.MpxlaError) as error:
        train_step(smp.DistributedModel(Model(max_norm)), batch_of(0))
    return str(error.value)


@pytest.mark.slow
def test_divided_parameters_are_not_written_to():
    for text in run_ranks(refuse_divided, 2):
        assert "the step writes to first.weight, whose values are divided over ranks" in text
