"""What a step leaves in modules that no model holds: metrics that are read between steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3


class Metric(nn.Module):
    """Adds up in attributes, as torchmetrics does."""

    def __init__(self):
        super().__init__()
        self.correct, self.num = torch.tensor(0), torch.tensor(0)
        self.best, self.last = torch.tensor(-1e9), None
        self.seen, self.labels, self.computed = [], [], None

    def update(self, logits, y):
        self.computed = None
        self.correct = self.correct + (logits.argmax(1) == y).sum()
        self.num = self.num + len(y)
        self.best = torch.max(self.best, logits.max())
        self.last = y
        self.seen.append(logits)
        self.labels.append(y)

    def values(self):
        seen, labels = torch.cat(self.seen), torch.cat(self.labels)
        return [self.correct, self.num, self.best, self.last, seen, labels, self.computed]


class Curve(Metric):
    """Only appends, and may decide by the values."""

    def update(self, logits, y):
        self.computed = None
        scores = logits.sigmoid() if y.max() > 0 and not (logits > -1e9).all() else logits
        self.seen.append(scores)
        self.labels.append(y)
        self.last = y


class Center(nn.Module):
    """A loss with a buffer by which the next microbatch goes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def update(self, logits, y):
        self.center = 0.9 * self.center + 0.1 * logits.mean(0)


class Compared(Metric):
    """Compares its sums, which stand-ins for them would answer otherwise."""

    def update(self, logits, y):
        self.num = self.num + (logits > 0).sum()
        if isinstance(self.num, torch.Tensor) and logits.sum() > 1e9:
            self.num = self.num * 0


def trained(kind, step, model):
    metric, found = kind(), []
    for number in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 5, generator=generator)
        y = torch.randint(3, (4,), generator=generator)
        step(model, metric, x, y)
        found.append(metric.values())
        metric.computed = number  # what `compute` remembers until the next update
    return found


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def train(kinds):
    @smp.step
    def step(model, metric, x, y):
        logits = model(x)
        model.backward(F.cross_entropy(logits, y))
        metric.update(logits.detach(), y)

    found = []
    for kind in kinds:
        smp.init({"microbatches": 2, "pipeline_parallel_degree": 1})
        try:
            found.append(trained(kind, step, smp.DistributedModel(made())))
        except CaptureError as error:
            found.append(str(error))
        smp.shutdown()
    return found


def plainly(kind):
    def step(model, metric, x, y):
        for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            metric.update(model(part).detach(), labels)

    return trained(kind, step, made())


def test_metrics_of_no_model_are_what_they_are_in_plain_pytorch():
    ((metric, curve, center, compared),) = run_ranks(train, 1, [Metric, Curve, Center, Compared])
    torch.testing.assert_close(metric, plainly(Metric))
    torch.testing.assert_close(curve, plainly(Curve))
    assert ".center, and gives it a tensor" in center
    assert ".num, and gives it a tensor" in compared
