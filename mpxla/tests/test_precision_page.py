"""The table of memory in docs/precision.md, and what the page says is refused."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import MpxlaError, StepError
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


def measured(config, dtype=torch.float32):
    """Bytes per parameter after an update: parameters, masters, gradients, Adam's state."""
    import mpxla as smp

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(nn.Linear(64, 64).to(dtype))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def step(model, x):
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 64))
    optimizer.step()
    parameters = list(model.local_parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    masters = [p for p in held if all(p is not own for own in parameters)]
    gradients = [p.grad for p in held if p.grad is not None]  # parameters would gather theirs
    state = [v for p in held for v in optimizer.state[p].values() if v.dim()]
    count = sum(p.numel() for p in parameters)
    sizes = [
        sum(t.numel() * t.element_size() for t in tensors) / count
        for tensors in (parameters, masters, gradients, state)
    ]
    smp.shutdown()
    return sizes


def measured_alone():
    return [
        measured({}),
        measured({"bf16": True}),
        measured({"fp16": True}),
        measured({"stochastic_rounding": True}, torch.bfloat16),
    ]


def measured_together():
    return measured({"bf16": True, "ddp": True, "shard_optimizer_state": True})


@pytest.mark.slow
def test_memory_is_that_of_the_page():
    (alone,) = run_ranks(measured_alone, 1)
    together = run_ranks(measured_together, 2)[0]
    page = PAGE.read_text()
    names = ["float32, autocast", "`bf16: True`", "`fp16: True`",
             'bfloat16, `master_dtype: "same"` or `stochastic_rounding`',
             "the same, `shard_optimizer_state`, 2 replicas"]  # fmt: skip
    for name, sizes in zip(names, [*alone, together], strict=True):
        row = " | ".join(f"{round(size)}" for size in [*sizes, sum(sizes)])
        assert f"| {name} | {row} |" in page, (name, row)


def scaler_in_vain(config, inside):
    import mpxla as smp

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(nn.Linear(4, 4))
    scaler = smp.amp.GradScaler()

    @smp.step
    def step(model, x):
        loss = F.mse_loss(model(x), x)
        if inside:
            scaler.get_scale()
        model.backward(scaler.scale(loss))
        return loss

    return refused(lambda: step(model, torch.ones(4, 4)))


@pytest.mark.parametrize(
    ("config", "inside", "error", "text"),
    [
        ({"bf16": True}, False, MpxlaError, "with bf16: True. bfloat16 has the range of float32"),
        ({"fp16": True}, False, MpxlaError, "with fp16: True, whose DistributedOptimizer scales"),
        ({}, True, StepError, "get_scale.. was called in a step function"),
    ],
    ids=["bf16", "fp16", "inside"],
)
def test_a_scaler_in_vain_is_refused(config, inside, error, text):
    check_texts(run_ranks(scaler_in_vain, 1, config, inside), error, text)


def train_plainly_in_fp16(calls_model):
    import mpxla as smp

    smp.init({"fp16": True})
    torch.manual_seed(2)
    model = smp.DistributedModel(nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=256.0
    )
    loss = F.mse_loss(
        model(torch.ones(2, 4, device=optimizer.param_groups[0]["params"][0].device)),
        torch.zeros(2, 4, device=optimizer.param_groups[0]["params"][0].device),
    )
    model.backward(loss) if calls_model else loss.backward()
    optimizer.step()
    return [p.detach().cpu() for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("calls_model", [True, False], ids=["model.backward", "loss.backward"])
def test_plain_backwards_are_scaled_under_fp16(calls_model):
    (found,) = run_ranks(train_plainly_in_fp16, 1, calls_model)
    torch.manual_seed(2)
    model = nn.Linear(4, 4)
    F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    expected = [(p - p.grad).detach() for p in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
