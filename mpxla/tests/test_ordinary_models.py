"""Ordinary models in stages have the losses and gradients of plain PyTorch.

All run one step in the stages of one process; some train on two ranks as well.
"""

import pytest
import torch

from mpxla.tests.clients import merged
from mpxla.tests.models_ordinary import MODELS, loss_of
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
TRAINED = ("mixtral", "functions", "operator")
SAMPLE = ("masked",)
WEIGHED = ("masked", "mamba")


def built(name):
    torch.manual_seed(11)
    return MODELS[name]()


def compared(names):
    """For every model what differs between one step in two stages and a plain one."""
    from mpxla.tests.stages_by_hand import differences, run_in_stages, run_plainly

    found = {}
    for name in names:
        model, batch = built(name)
        plain = run_plainly(model, loss_of, batch)
        # What a stage saves is looked at where cuts weigh memory.
        staged = run_in_stages(model, loss_of, batch, memory_weight=0.8 * (name in WEIGHED))
        found[name] = differences(plain, staged)
    return found


@pytest.mark.slow
def test_one_step_in_two_stages():
    (found,) = run_ranks(compared, 1, SAMPLE, timeout_s=300)
    assert found == dict.fromkeys(SAMPLE, "")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_one_step_of_further_models_in_two_stages():
    names = tuple(set(MODELS) - {*SAMPLE, *TRAINED})
    (found,) = run_ranks(compared, 1, names, timeout_s=1700)
    assert found == dict.fromkeys(names, "")


def trained(name):
    """Losses and final parameters of several AdamW steps on this rank."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    raw, batch = built(name)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(raw.parameters(), lr=1e-2))
    step = smp.step(train_step)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch).reduce_mean().item())
        optimizer.step()
    return losses, {n: p.detach().cpu() for n, p in model.local_named_parameters()}


def train_step(model, batch):
    loss = loss_of(model, batch)
    model.backward(loss)
    return loss


def trained_plainly(name):
    model, batch = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    halves = [{n: v.chunk(2)[i] for n, v in batch.items()} for i in range(2)]
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        found = [loss_of(model, half) for half in halves]
        loss = sum(found) / 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "name",
    ["functions", *(pytest.param(n, marks=pytest.mark.slow) for n in ("operator", "mixtral"))],
)
def test_training_on_two_ranks(name):
    ranks = run_ranks(trained, 2, name, timeout_s=300)
    losses, parameters = trained_plainly(name)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-4)
    held = merged([part for _, part in ranks])
    assert min(len(part) for _, part in ranks) > 0, "both ranks hold parameters"
    torch.testing.assert_close(held, parameters, rtol=1e-3, atol=2e-5)
