"""Step functions that ask for integers, or for what earlier microbatches write: as PyTorch."""

import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host, logged, train_step
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 4
NUM_STEPS = 3
functional = nn.functional


class ActNorm(nn.Module):
    """Takes its scale from the first batch that it sees."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("is_set", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.training and self.is_set.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / (x.std(0) + 1e-3))
                self.is_set.fill_(1)
        return (x + self.shift) * self.scale


class Net(nn.Module):
    """Layers around what `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.least = kind, 1.0
        self.first, self.last, self.gate = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.norms = nn.ModuleList(ActNorm(8) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(8, 8))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, self.kind)(h))

    # --- what earlier microbatches write decides ---------------------------------------------

    def data_dependent_start(self, h):
        return self.norms[1](torch.tanh(self.norms[0](h)))

    def written_before(self, h):
        self.seen.add_(1)
        return h if self.seen + 0 * h.sum() > 5 else 2 * h

    def written_after(self, h):
        if self.seen + 0 * h.sum() > 5:
            h = 2 * h
        self.seen += 1
        return h

    def statistics(self, h):
        h = self.batch_norm(h)
        return h if self.batch_norm.running_var.mean() > 0.5 else 2 * h

    def turns(self, h):
        return 2 * h if self.batch_norm(h).mean() + self.batch_norm.num_batches_tracked > 6 else h

    def place_in_queue(self, h):
        place = int(self.seen)
        self.queue[place] = h.detach().mean(0)
        self.seen[...] = (place + 1) % 8
        return h + self.queue.mean(0)

    def least_so_far(self, h):
        mean = h.mean().item()
        if mean < self.least:
            self.least = mean
            h = 2 * h
        return h

    # --- integers ------------------------------------------------------------------------------

    def expert(self, h):
        return self.experts[int(self.gate(h).mean(0).argmax())](h)

    def expert_by_item(self, h):
        return self.experts[self.gate(h).mean(0).argmax().item()](h)

    def loop(self, h):
        for _ in range(self.gate(h).mean(0).argmax().item()):
            h = torch.tanh(self.experts[0](h))
        return h

    def table(self, h):
        return h * {0: 1.0, 1: 2.0, 2: 3.0}[self.gate(h).mean(0).argmax().item()]

    def listed(self, h):
        rows = [self.experts[i](row) for i, row in zip(self.gate(h[:1]).argmax(1).tolist(), h)]  # noqa: B905
        return torch.stack([*rows, *h[1:]])

    def arguments(self, h):
        number = self.gate(h).mean(0).argmax().item() + 1
        h = h + h[number] + torch.arange(number).sum() + h.roll(number, 0)
        return h.repeat(number, 1).view(number, -1, 8).sum(0) + h.topk(number, 1).values.mean()

    def tensors_as_sizes(self, h):
        number = self.gate(h).mean(0).argmax() + 1
        h = h + functional.pad(h, (0, number))[:, -8:]
        return h[:, None].expand(-1, number, -1).sum(1) + h.narrow(1, 0, number).mean()

    def of_float(self, h):
        return h * int(10 * h.abs().mean()) / 10


STATEFUL = "data_dependent_start written_before written_after statistics turns place_in_queue"
STATEFUL += " least_so_far"
INTEGER = "expert expert_by_item loop table listed arguments tensors_as_sizes of_float"


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = 2 * torch.randn(4 * MICROBATCHES, 6, generator=generator)
    return x, torch.randint(4, (4 * MICROBATCHES,), generator=generator)


def raw_model(kind):
    torch.manual_seed(3)
    return Net(kind)


def train_plainly(kind, num_steps):
    model = raw_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        for x, y in zip(*(value.split(4) for value in batch(number)), strict=True):
            loss = functional.cross_entropy(model(x), y)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
    return torch.tensor(losses), host(model.state_dict().items())


def train(keys, kind, num_steps):
    """Losses, the model, types of its buffers, and log lines."""
    smp.init({"microbatches": MICROBATCHES, **keys})
    model = smp.DistributedModel(raw_model(kind))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    step = smp.step(train_step)
    losses = []
    with logged() as lines:
        for number in range(num_steps):
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(model, *batch(number)).outputs]
            optimizer.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    here = [buffer for buffer in model.module.buffers() if not buffer.is_meta]
    return torch.tensor(losses), state, {type(buffer) for buffer in here}, lines


def compare(kind, stages):
    """Log lines of each rank, whose numbers are right."""
    expected, parameters = train_plainly(kind, NUM_STEPS)
    results = run_ranks(train, stages, {"pipeline_parallel_degree": stages}, kind, NUM_STEPS)
    for losses, state, buffer_types, _ in results:
        close(losses, expected)
        close(state, parameters)
        assert buffer_types <= {torch.Tensor}
    return [lines for *_, lines in results]


def slow_but(kinds, *fast):
    return [
        pytest.param(kind, stages, marks=() if stages == 2 and kind in fast else pytest.mark.slow)
        for kind in kinds.split()
        for stages in (2, 1)
    ]


@pytest.mark.parametrize(("kind", "stages"), slow_but(STATEFUL, "written_after", "least_so_far"))
def test_what_earlier_microbatches_write_decides(kind, stages):
    lines = compare(kind, stages)[0]
    (warning,) = [line for line in lines if "one after the other where they do" in line]
    assert re.search(r"train_step branches at .*test_asking_again\.py:\d+: .* on a value", warning)
    if kind == "data_dependent_start":
        names = r"norms\.0\.is_set( and norms\.1\.is_set)?"
        assert re.search(rf"depends on {names}, which microbatches write to", warning)


@pytest.mark.parametrize(("kind", "stages"), slow_but(INTEGER))
def test_integers_decide(kind, stages):
    compare(kind, stages)


def refused():
    with pytest.raises(smp.errors.StepError) as caught:
        train({"ddp": True}, "written_after", 1)
    return str(caught.value)


def test_replicas_do_not_run_one_microbatch_after_the_other():
    for text in run_ranks(refused, 2):
        assert re.search(
            r"train_step branches at .*: if self\.seen .* depends on seen, which ear", text
        )
        assert "not possible with several replicas" in text and "Use microbatches: 1" in text
