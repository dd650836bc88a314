"""Experts whose rows are slices between counts, joined without a known end: as plain PyTorch."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_EXPERTS, ROWS, NUM_STEPS = 3, 6, 3
functional = nn.functional


class Experts(nn.Module):
    """Rows of an expert stand side by side, as in DeepSeek's layers.

    Args:
        skips: whether an expert without rows is left out.
    """

    def __init__(self, skips):
        super().__init__()
        self.skips, self.first, self.gate = skips, nn.Linear(4, 4), nn.Linear(4, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_EXPERTS))

    def forward(self, x):
        h = self.first(x)
        chosen = self.gate(h).argmax(1)
        order = chosen.argsort()
        rows, ends = h[order], torch.bincount(chosen, minlength=3).cumsum(0).tolist()
        found = []
        for number, end in enumerate(ends):
            start = 0 if number == 0 else ends[number - 1]
            if self.skips and start == end:
                continue
            found.append(torch.tanh(self.experts[number](rows[start:end])))
        joined = torch.cat(found, dim=0)
        made = torch.empty_like(joined)
        made[order] = joined
        return made * torch.arange(ROWS)[:, None] + x


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 2 * ROWS, 4, generator=generator)
    return x, y


def raw_model(skips):
    torch.manual_seed(3)
    return Experts(skips)


def train_plainly(skips):
    model = raw_model(skips)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(value.chunk(2) for value in batch(number)), strict=True):
            loss = functional.mse_loss(model(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
    return torch.tensor(losses), host(model.state_dict().items())


def train(stages, kinds):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": stages})
    found = []
    for skips in kinds:
        model = smp.DistributedModel(raw_model(skips))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02))

        @smp.step
        def step(x, y, model=model):
            loss = functional.mse_loss(model(x), y)
            model.backward(loss)
            return loss

        losses = []
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(*batch(number)).outputs]
            optimizer.step()
        found.append((torch.tensor(losses), host(model.state_dict().items())))
    return found


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        ([False], 2),
        pytest.param([True], 1, marks=pytest.mark.slow),
        pytest.param([True, False], 2, marks=pytest.mark.slow),
    ],
)
def test_experts_are_those_of_pytorch(kinds, stages):
    for found in run_ranks(train, stages, stages, kinds):
        for skips, (losses, state) in zip(kinds, found, strict=True):
            expected, parameters = train_plainly(skips)
            close(losses, expected)
            close(state, parameters)


def join_some():
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(4, 4))

    @smp.step
    def step(x, y):
        h = model(x)
        first, last = (h > y).sum(0).cumsum(0)[:2].tolist()
        model.backward((torch.cat([h[:first], h[first:last].exp()]) + x).sum())

    x = torch.zeros(ROWS, 4)
    step(x, torch.full_like(x, 1e3).index_fill(0, torch.arange(3), -1e3))  # three of each column
    with pytest.raises(StepError) as caught:
        step(x, torch.full_like(x, 1e3).index_fill(0, torch.arange(2), -1e3))
    return str(caught.value)


def test_slices_without_all_rows_are_an_error():
    (text,) = run_ranks(join_some, 1)
    assert "slices that do not have all rows, where they are joined at" in text
    assert "test_joined_slices.py" in text
