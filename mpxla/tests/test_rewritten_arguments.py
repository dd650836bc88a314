"""Step functions that change their arguments in place, as with one process: callers see it."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MASK, IGNORED = 0, -100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, ids, noise):
        return self.head(torch.tanh(self.inner(self.embed(ids) + noise["noise"])))


def masked_loss(model, ids, *, noise, labels):
    """BERT's objective, masked in the step, and what else scripts do to a batch."""
    labels[ids < 4] = IGNORED
    ids[labels != IGNORED] = MASK
    noise["noise"].mul_(0.5).add_(noise["noise"].mean(1, keepdim=True))
    logits = model(ids, noise)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 9, (4, 5), generator=generator)
    return ids, ids.clone(), torch.randn(4, 5, 4, generator=generator)


def train(config, backward):
    """Losses, and what the batch is afterwards: each step gets what the last one has left."""
    ids, labels, noise = batch()
    losses = []
    for _ in range(3):
        ids.clamp_(min=1).add_(1).remainder_(9)
        ids[:, 0] = torch.arange(4, 8)
        labels.copy_(ids)
        losses.append(backward(ids, noise={"noise": noise}, labels=labels))
    return losses, [ids, labels, noise]


def train_here(config):
    smp.init(config)
    model = smp.DistributedModel(Model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5))

    @smp.step
    def step(model, ids, noise, labels):
        loss = masked_loss(model, ids, noise=noise, labels=labels)
        model.backward(loss)
        return loss

    def backward(*args, **kwargs):
        optimizer.zero_grad()
        loss = step(model, *args, **kwargs).reduce_mean().item()
        optimizer.step()
        return loss

    return *train(config, backward), model.state_dict()


def train_plain(num_microbatches):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def backward(ids, noise, labels):
        optimizer.zero_grad()
        total = 0.0
        for part in range(num_microbatches):
            own, also, more = (
                t.chunk(num_microbatches)[part] for t in (ids, labels, *noise.values())
            )
            loss = masked_loss(model, own, noise={"noise": more}, labels=also)
            (loss / num_microbatches).backward()
            total += loss.item() / num_microbatches
        optimizer.step()
        return total

    return *train({}, backward), model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "config"),
    [(1, {"microbatches": 2}), (2, {"microbatches": 4, "pipeline_parallel_degree": 2})],
)
def test_callers_see_what_a_step_changes(world_size, config):
    losses, tensors, state = train_plain(config["microbatches"])
    for found, changed, own in run_ranks(train_here, world_size, config):
        assert found == pytest.approx(losses, rel=1e-5)
        for value, expected in zip(changed, tensors, strict=True):
            torch.testing.assert_close(value, expected)
        for name, value in state.items():
            torch.testing.assert_close(own[name].cpu(), value, rtol=1e-4, atol=1e-5)


def refuse():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    @smp.step(non_split_inputs=["scale"])
    def scaled(model, x, scale):
        model.backward(model(x * scale.mul_(0.5)).sum())

    @smp.step
    def twice(model, x, y):
        model.backward(model(x.neg_() + y).sum())

    with pytest.raises(smp.StepError, match=r"scaled: .*argument .*\[2\] in place, .* gets whole"):
        scaled(model, torch.ones(4, 2), torch.ones(2))
    x = torch.ones(4, 2)
    with pytest.raises(smp.StepError, match=r"twice: .*\[1\] in place, which shares .*\[2\]"):
        twice(model, x, x)
    twice(model, x[:, :1].expand(4, 2).clone(), x)
    assert (x == 1).all()


def test_changes_that_others_would_see_are_refused():
    run_ranks(refuse, 2)
