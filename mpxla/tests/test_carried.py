"""Tensors that a step leaves in attributes: what plain PyTorch leaves there, and goes on by."""

import contextlib
import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError, StepError
from mpxla.tests.clients import close, logged, train_step, trained, trained_plainly
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_python_state import batch

pytestmark = pytest.mark.ranks

NUM_STEPS = 3


class Filling(nn.Module):
    """Puts what it has computed into a list of another module, as nets with several heads do."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, h):
        self.heads[0] = h.sin() + 0.5 * self.heads[0].detach()
        return h.cos()


class Net(nn.Module):
    """Layers around what `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.cell, self.lstm = nn.GRUCell(8, 8), nn.LSTMCell(8, 8)
        self.register_buffer("rates", torch.arange(8) / 8)
        zeros = torch.zeros(4, 8)
        self.state, self.hidden, self.pair = zeros, None, (zeros, zeros)
        self.ema, self.is_set, self.num_calls = torch.zeros(()), False, 0
        self.count, self.mean = torch.tensor(0), torch.zeros(8)
        self.states, self.by_name = [None, None], {"a": {"mean": torch.zeros(8)}}
        self.past = deque([torch.zeros(8) for _ in range(2)], maxlen=2)
        self.table = self.aux = self.seen = None
        self.register_buffer("trace", torch.zeros(0), persistent=False)
        self.register_buffer("bias", None, persistent=False)
        self.parts, self.memory, self.fresh_count = {"trace": 0.0}, {}, None
        self.heads = [] if kind == "in_a_list_that_is_empty" else [torch.zeros(4, 8)]
        self.filling = Filling(self.heads)

    def forward(self, x):
        return self.last(getattr(self, self.kind)(torch.tanh(self.first(x))))

    def __getattr__(self, name):
        if name == "of_parts" and "trace" in self.__dict__["parts"]:
            return self.parts["trace"]
        return super().__getattr__(name)

    def there(self, h):
        h = self.cell(h, self.state)
        self.state = h.detach()
        return h

    def none_at_first(self, h):
        h = self.cell(h, self.hidden if self.hidden is not None else torch.ones(4, 8))
        self.hidden = h.detach()
        return h

    def missing_at_first(self, h):
        if not hasattr(self, "fresh"):
            self.fresh = torch.ones(4, 8)
        h = self.cell(h, self.fresh)
        self.fresh = h.detach()
        return h

    def in_a_tuple(self, h):
        self.pair = tuple(state.detach() for state in self.lstm(h, self.pair))
        return self.pair[0] + self.lstm(h)[0]

    def exchanged(self, h):
        one, other = self.pair
        self.pair = other, one + h.detach()
        return h + 0.1 * one - other

    def number(self, h):
        self.hidden = 0.0 if self.hidden is None else self.hidden
        self.hidden = 0.9 * self.hidden + h.detach().pow(2).mean()
        return h / (1 + self.hidden)

    def by_a_flag(self, h):
        norm = h.detach().norm()
        self.ema = 0.9 * self.ema + 0.1 * norm if self.is_set else norm
        self.is_set = True
        return h / self.ema

    def beside_a_counter(self, h):
        self.num_calls += 1
        self.hidden = h.detach() if self.hidden is None else 0.5 * self.hidden + h.detach()
        return h + self.hidden * self.num_calls

    def counted(self, h):
        self.count = self.count + 1
        return h * self.count

    def in_place(self, h):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        self.count += 1
        return (h - self.mean) * self.count

    def in_containers(self, h):
        if self.states[1] is not None:
            h = h + self.states[1] - self.by_name["a"]["mean"]
        self.states[0], self.states[1] = 2 * h.detach(), h.detach()
        self.by_name["a"]["mean"] = h.detach().mean(0)
        return h

    def window(self, h):
        past = torch.stack(list(self.past)).mean(0)
        self.past.append(h.detach().mean(0))
        return h - past

    def inputs(self, h):  # which Python asks for
        if bool(self.given.sum() > 0):
            h = 2 * h
        before, self.hidden = self.hidden, self.given.detach()
        return h if before is None else h + before.mean()

    def in_a_buffer_that_is_empty(self, h):
        if self.trace.shape != h.shape:
            self.trace = torch.zeros_like(h)
        self.trace = 0.5 * self.trace.detach() + h
        return h + self.trace

    def registered_again(self, h):
        self.cell.to(h.device).cpu()
        if self.bias is None or self.bias.shape[-1] < h.shape[-1]:
            self.register_buffer("bias", self.rates.cos() * torch.arange(8), persistent=False)
        return h + self.bias

    def by_keys(self, h):
        before = self.parts["trace"]
        h = h + self.of_parts  # looked up by __getattr__
        self.parts["trace"] = 0.5 * before + h.detach()
        return h

    def in_a_shared_list(self, h):
        return self.filling(h) * self.heads[0]

    def under_new_keys(self, h):
        if "mean" not in self.memory:
            self.memory["mean"] = h.detach().mean(0)
        self.memory["count"] = self.memory.get("count", 0) + torch.ones(8)
        return h * self.memory["count"] + self.memory["mean"]

    def counted_from_none(self, h):
        if self.fresh_count is None:
            self.fresh_count = torch.zeros(8)
        self.fresh_count = self.fresh_count + 1
        return h * self.fresh_count

    def in_a_list_that_is_empty(self, h):
        if not self.heads:
            self.heads.append(torch.ones(8))
        self.heads[0] = 0.5 * self.heads[0]
        return h * self.heads[0]

    def left(self, h):
        self.aux, self.seen = h.pow(2).mean(), {"h": h.detach()}
        return h

    def cache(self, h):
        if self.table is None:
            self.table = self.rates.cos() * torch.arange(8)
        return h * self.table


class Given(Net):
    """Keeps its input in sight."""

    def forward(self, x):
        self.given = x
        return super().forward(x)


def made(kind):
    torch.manual_seed(3)
    if kind == "beside_a_module_in_two_places":  # for which export has proxies
        net = Net("registered_again")
        net.one = net.other = nn.Tanh()
        return net
    return (Given if kind == "inputs" else Net)(kind)


MORE_NAMES = ("parts", "memory", "fresh_count", "trace")


def look(model):
    """The sums of what is there; tensors of other ranks have none."""
    names = "heads state hidden pair fresh ema count mean states by_name past aux seen".split()
    values = {name: getattr(model, name, None) for name in (*names, *MORE_NAMES)}
    found = {}
    for name, value in values.items():
        leaves = torch.utils._pytree.tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and not any(t.is_meta for t in tensors):
            found[name] = sum(t.detach().cpu().double().sum().item() for t in tensors)
    return found


def batches():
    return [batch(number) for number in range(NUM_STEPS)]


def check(kind, stages, **keys):
    expected, parameters, seen = trained_plainly(made(kind), batches(), 2, look)
    keys = {"pipeline_parallel_degree": stages, "microbatches": 2, **keys}
    everyone = run_ranks(trained, stages, keys, made(kind), batches(), look)
    for losses, state, _ in everyone:
        close(losses, expected)
        close(state, parameters)
    for step, wanted in enumerate(seen):
        found = {}
        for _, _, own in everyone:
            found |= own[step]
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


KINDS = """
there none_at_first missing_at_first in_a_tuple exchanged number by_a_flag beside_a_counter counted
in_place in_containers window inputs left in_a_buffer_that_is_empty registered_again by_keys
in_a_shared_list beside_a_module_in_two_places under_new_keys
counted_from_none in_a_list_that_is_empty
"""
FAST = {
    ("beside_a_module_in_two_places", 1),
    ("by_a_flag", 2),
    ("registered_again", 2),
    ("under_new_keys", 2),
    ("counted_from_none", 2),
    ("in_a_shared_list", 1),
}


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        pytest.param(kind, n, marks=() if (kind, n) in FAST else pytest.mark.slow)
        for kind in KINDS.split()
        for n in (1, 2)
    ],
)
def test_tensors_in_attributes_are_what_they_are_in_pytorch(kind, stages):
    check(kind, stages)


class Aliases(nn.Module):
    """Lists parameters in an attribute, as `nn.LSTM` does while it is captured."""

    def __init__(self, place=lambda stage: contextlib.nullcontext()):
        super().__init__()
        torch.manual_seed(3)
        with place(0):
            self.first, self.weights = nn.Linear(6, 8), []
        with place(1):
            self.second = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        if not self.weights:
            self.weights = [self.first.weight]
        scale = 1 + sum(weight.square().mean() for weight in self.weights)
        return scale * self.second(self.first(x)[:, None])[0][:, 0]


def train_aliases():
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    raw = Aliases(smp.partition)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, losses = smp.step(train_step), []
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(step(model, x, y).reduce_mean().item())
        optimizer.step()
    return losses, sorted(raw.state_dict())


def test_parameters_in_attributes_stay_parameters():
    model = Aliases()
    losses, _, _ = trained_plainly(model, batches(), 2, lambda _: None)
    for found, names in run_ranks(train_aliases, 2):
        close(torch.tensor(found), losses.view(-1, 2).mean(1))
        assert names == sorted(model.state_dict())


@pytest.mark.slow
def test_a_cache_of_what_never_changes_is_not_carried():
    check("cache", 2)
    (lines,) = run_ranks(reset_and_train, 1, "cache", 0)
    assert sum("compiled" in line for line in lines[1]) == 1


def reset_and_train(kind, every):
    """Losses, of a script that forgets the state after some steps, and the log."""
    smp.init({"microbatches": 2})
    raw = made(kind)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, losses = smp.step(train_step), []
    with logged() as lines:
        for number in range(4):
            if every and number % every == 0:
                raw.hidden, raw.state = None, torch.full((4, 8), 0.5)
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(model, *batch(number)).outputs]
            optimizer.step()
    return losses, lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["there", "none_at_first"])
def test_a_script_that_sets_them_between_steps_starts_anew(kind):
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for number in range(4):
        if number % 2 == 0:
            model.hidden, model.state = None, torch.full((4, 8), 0.5)
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(2) for v in batch(number)), strict=True):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / 2).backward()
            expected.append(loss.item())
        optimizer.step()
    ((losses, _),) = run_ranks(reset_and_train, 1, kind, 2)
    assert losses == pytest.approx(expected, rel=1e-4)


class Sized(nn.Module):
    """Begins anew with every size of batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.Linear(6, 6), None

    def forward(self, x):
        if self.hidden is None or self.hidden.shape[0] != len(x):
            self.hidden = torch.ones(len(x), 6)
        self.hidden = 0.5 * self.hidden + torch.tanh(self.layer(x)).detach()
        return self.layer(x) * self.hidden


def evaluate_between():
    smp.init({"microbatches": 2})
    torch.manual_seed(3)
    model = smp.DistributedModel(Sized())
    step, found = smp.step(lambda model, x: model(x).sum()), []
    with torch.no_grad():
        for size in (4, 8, 8, 4, 4):
            found += [one.item() for one in step(model, torch.ones(size, 6)).outputs]
    return found


@pytest.mark.slow
def test_batches_of_another_size_find_what_earlier_ones_have_left():
    torch.manual_seed(3)
    model, expected = Sized(), []
    for size in (2, 2, 4, 4, 4, 4, 2, 2, 2, 2):
        expected.append(model(torch.ones(size, 6)).sum().item())
    assert run_ranks(evaluate_between, 1) == [pytest.approx(expected, rel=1e-4)]


class Scaled(nn.Module):
    """Has constants that steps exchange."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), torch.ones(6)
        self.parts, self.row = {"scale": torch.ones(6)}, [torch.ones(6)]

    def begin(self, value):
        self.scale = torch.full((6,), value)
        self.parts["scale"] = torch.full((6,), 2 * value)
        self.row[0] = torch.full((6,), 3 * value)

    def forward(self, x):
        return self.layer(x) * self.scale * self.parts["scale"] * self.row[0]


def half(model, x):
    model.begin(0.5)
    return model.layer(x).sum()


def quarter(model, x):
    model.begin(0.25)
    return model(x).sum()


def read(model, x):
    return model(x).sum()


def exchange(*steps):
    smp.init({})
    torch.manual_seed(3)
    module = Scaled()
    model = smp.DistributedModel(module)
    found = []
    for step in steps:
        run = smp.step(lambda model, x, step=step: step(module, x))
        with torch.no_grad():
            found.append(run(model, torch.ones(4, 6)).reduce_mean().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(half, read, quarter, read), (read, half, read, quarter, read)])
def test_constants_that_one_step_puts_there_are_there_for_another(steps):
    torch.manual_seed(3)
    model = Scaled()
    expected = [step(model, torch.ones(4, 6)).item() for step in steps]
    assert run_ranks(exchange, 1, *steps) == [pytest.approx(expected, rel=1e-4)]


def replica(kind):
    smp.init({"microbatches": 2, "ddp": True})
    raw = made(kind)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(train_step)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        step(model, *batch(10 * smp.rank() + number))
        optimizer.step()
    return {n: v.cpu().clone() for n, v in model.state_dict().items()}, look(raw)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["there", "none_at_first"])
def test_every_replica_has_its_own(kind):
    models = [made(kind)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number in range(NUM_STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            for x, y in zip(*(v.chunk(2) for v in batch(10 * rank + number)), strict=True):
                (nn.functional.cross_entropy(model(x), y) / 2).backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            if one.grad is not None:
                one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    for rank, (state, seen) in enumerate(run_ranks(replica, 2, kind)):
        close(state, dict(models[rank].state_dict()))
        assert seen == pytest.approx(look(models[rank]), rel=1e-4)
    assert look(models[0]) != pytest.approx(look(models[1]), rel=1e-2)


class Growing(nn.Module):
    """Keeps everything."""

    def __init__(self):
        super().__init__()
        self.layer, self.all = nn.Linear(6, 4), torch.zeros(1, 4)

    def forward(self, x):
        y = self.layer(x)
        self.all = torch.cat([self.all, y.detach()])
        return y + self.all.mean()


class Settings:
    """An object of the script's."""


class Elsewhere(nn.Module):
    """Keeps it in an object that is no module."""

    def __init__(self):
        super().__init__()
        self.layer, self.settings = nn.Linear(6, 4), Settings()
        self.settings.mean = torch.zeros(4)

    def forward(self, x):
        y = self.layer(x) + self.settings.mean
        self.settings.mean = y.detach().mean(0)
        return y


class Late(nn.Module):
    """Computes with the weight of the call before, as a weight-normed layer does that is pruned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.effective = 2 * self.layer.weight

    def forward(self, x):
        y = self.layer(x) + x @ self.effective.t()
        self.effective = 2 * self.layer.weight
        return y


class LateBuffer(Late):
    """The same of a buffer."""

    def __init__(self):
        super().__init__()
        del self.effective
        self.register_buffer("effective", torch.ones(4, 6))


class LateQueue(Late):
    """The same two calls later."""

    def __init__(self):
        super().__init__()
        self.past = deque([torch.ones(4, 6), torch.ones(4, 6)], maxlen=2)

    def forward(self, x):
        y = self.layer(x) + x @ self.past[0].t()
        self.past.append(2 * self.layer.weight)
        return y


class LateParameter(Late):
    """The same of an attribute of a parameter."""

    def __init__(self):
        super().__init__()
        self.layer.weight.late = torch.ones(4, 6)

    def forward(self, x):
        y = self.layer(x) + x @ self.layer.weight.late.t()
        self.layer.weight.late = 2 * self.layer.weight
        return y


class OnModule(nn.Module):
    """Counts in an attribute of a module that no model holds, beginning with zeros."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(6, 4), None
        self.others = [nn.Module()]
        self.others[0].count = None

    @property
    def holder(self):
        return self.others[0]

    def forward(self, x):
        if self.holder.count is None:
            self.holder.count = torch.zeros(4)
        self.holder.count = self.holder.count + 1
        return self.layer(x) * self.holder.count


class OnObject(OnModule):
    """Counts in an object."""

    def __init__(self):
        super().__init__()
        self.settings = SimpleNamespace(count=None)

    @property
    def holder(self):
        return self.settings


def refuse(kinds):
    found = []
    for kind in kinds:
        smp.init({"microbatches": 2})
        with pytest.raises(CaptureError) as caught:
            smp.step(train_step)(smp.DistributedModel(kind()), *batch(0))
        found.append(str(caught.value))
        smp.shutdown()
    return found


def test_counters_elsewhere_that_begin_with_constants_are_refused():
    ((of_module, of_object),) = run_ranks(refuse, 1, [OnModule, OnObject])
    assert "count, and gives it a tensor" in of_module
    assert "settings.count, and gives it a tensor" in of_object


@pytest.mark.slow
def test_what_grows_and_what_is_elsewhere_is_refused():
    kinds = [Growing, Elsewhere, Late, LateBuffer, LateQueue, LateParameter]
    ((growing, elsewhere, *late),) = run_ranks(refuse, 1, kinds)
    assert "computes with the attribute all of a Growing, where it finds float32[5, 4]" in growing
    assert "leaves float32[9, 4] there. Programs are compiled for one shape" in growing
    assert "reads model.settings.mean, and gives it a tensor at " in elsewhere
    places = "attribute effective of a Late", "buffer effective", "attribute past of a LateQueue"
    for text, place in zip(late, (*places, "attribute late of a parameter"), strict=True):
        assert f"in the {place} that depends on parameters" in text


def look_elsewhere():
    smp.init({"microbatches": 2, "pipeline_parallel_degree": 2})
    raw = made("left")
    smp.step(train_step)(smp.DistributedModel(raw), *batch(0))
    try:
        return raw.aux.item()
    except StepError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_that_do_not_have_them_say_so():
    (text,) = [found for found in run_ranks(look_elsewhere, 2) if isinstance(found, str)]
    assert "has none here: they are on another pipeline rank" in text
