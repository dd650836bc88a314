"""Every precision against plain PyTorch that does the same in one process, with dropout.

The masks of dropout are results of the step, and the reference is given them. That the type of
sums over microbatches shows in losses is tested with more of them, in `test_mixed_precision`.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.models import Gpt, Vit, conv_net, subject
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 20
BF16, F16 = torch.bfloat16, torch.float16
NUM_PARTS = 4
"""Microbatches of an update, over all passes and replicas."""
SCALE = 2.0**10
DROP = 0.1
BOUND = 0.01
"""Of the losses of 20 steps, in units of the first: XLA and PyTorch round to 16 bits in different
places."""


class Drop(nn.Module):
    """Dropout that tells its masks, or takes them."""

    p = 0.0  # models read it for attention, which is left without

    def __init__(self, masks):
        super().__init__()
        self.masks = masks

    def forward(self, x):
        if self.masks.given is not None:
            return x * self.masks.given.pop(0).to(x.dtype)
        mask = F.dropout(torch.ones_like(x), DROP)
        self.masks.drawn.append(mask)
        return x * mask


class Masks:
    """Of all dropouts of a model, in the order of their calls."""

    def __init__(self):
        self.given = None
        self.drawn = []


class Whole(nn.Module):
    """A model, which returns its logits and masks."""

    def __init__(self, kind):
        super().__init__()
        self._masks = Masks()
        self.inner = KINDS[kind]()
        for part in list(self.inner.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(part, name, Drop(self._masks))

    def forward(self, *args, **kwargs):
        self._masks.drawn.clear()
        found = self.inner(*args, **kwargs)
        return getattr(found, "logits", found), tuple(self._masks.drawn)

    def give(self, masks):
        self._masks.given = list(masks)


KINDS = {
    "gpt": lambda: Gpt(num_blocks=4, dropout=DROP),
    "vit": lambda: Vit(num_blocks=4),
    "conv": lambda: nn.Sequential(conv_net()[:-1], nn.Dropout(DROP), conv_net()[-1:]),
    "llama": lambda: subject("llama").build(),
    "bert": lambda: subject("bert").build(),
}


def made(kind):
    torch.manual_seed(3)
    return Whole(kind)


def data(kind, step):
    """One microbatch: (arguments, targets)."""
    torch.manual_seed(100 + step % 2)
    batch = subject({"conv": "conv_net"}.get(kind, kind)).batch(2)
    if kind in ("llama", "bert"):
        target = batch.pop("labels")
        target = F.pad(target[:, 1:], (0, 1), value=-100) if kind == "llama" else target
        return batch, target
    names = ("tokens", "targets") if kind == "gpt" else ("x", "y")
    return {"input": batch[names[0]]}, batch[names[1]]


def called(model, inputs):
    return model(inputs["input"]) if "input" in inputs else model(**inputs)


def loss_of(logits, target):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), target.reshape(-1))


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        mode: "bf16" and "fp16" (keys), "autocast" (bfloat16), "scaler" (autocast in float16).
        kind: the model.
        replicas: how many.
        stages: of each.
        is_sharded: `shard_optimizer_state`.
        passes: step calls per update.
        max_norm: clips gradients, if given.
        backend: of the ranks.
    """

    mode: str
    kind: str
    replicas: int = 1
    stages: int = 1
    is_sharded: bool = False
    passes: int = 1
    max_norm: float | None = None
    backend: str = "torch_xla"

    def __str__(self):
        words = [self.mode, self.kind, f"{self.replicas}x{self.stages}"]
        words += ["zero"] * self.is_sharded + [f"passes{self.passes}"] * (self.passes > 1)
        words += ["clipped"] * (self.max_norm is not None) + ["pjrt"] * (self.backend == "pjrt")
        return "-".join(words)

    @property
    def microbatches(self):
        return NUM_PARTS // self.replicas // self.passes

    @property
    def autocast_dtype(self):
        return {"autocast": BF16, "scaler": F16}.get(self.mode)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.03, momentum=0.5)


def train(case):
    """(replica, losses of every update by microbatch, masks likewise, scale at the end)."""
    import mpxla as smp

    smp.init(
        {
            "pipeline_parallel_degree": case.stages,
            "microbatches": case.microbatches,
            "ddp": True,
            "shard_optimizer_state": case.is_sharded,
            **({case.mode: True} if case.mode in ("bf16", "fp16") else {}),
        }
    )
    model = smp.DistributedModel(made(case.kind), backward_passes_per_step=case.passes)
    optimizer = smp.DistributedOptimizer(
        sgd(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": SCALE}
    )
    is_scaled = case.mode == "scaler"
    scaler = smp.amp.GradScaler(init_scale=SCALE, growth_interval=8, enabled=is_scaled)
    dtype = case.autocast_dtype

    @smp.step
    def step(model, inputs, target):
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            logits, masks = called(model, inputs)
            loss = loss_of(logits, target)
        model.backward(scaler.scale(loss))
        return loss, masks

    torch.manual_seed(50 + smp.rdp_rank())
    losses, drawn = [], []
    for number in range(NUM_STEPS):
        with torch.random.fork_rng():
            inputs, target = data(case.kind, number)
        count = case.microbatches
        inputs = {n: v.repeat(count, *[1] * (v.dim() - 1)) for n, v in inputs.items()}
        target = target.repeat(count, *[1] * (target.dim() - 1))
        optimizer.zero_grad()
        found, masks = [], []
        for _ in range(case.passes):
            loss, masks_of_pass = step(model, inputs, target)
            found += [value.item() for value in loss.outputs]
            masks += [[m.outputs[i].cpu() for m in masks_of_pass] for i in range(case.microbatches)]
        losses.append(found)
        drawn.append(masks)
        if is_scaled:
            scaler.unscale_(optimizer)
        if case.max_norm is not None and case.mode == "fp16":
            optimizer.clip_master_grads(case.max_norm)
        elif case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        scaler.step(optimizer)
        scaler.update()
    result = smp.rdp_rank(), losses, drawn, scaler.get_scale()
    smp.shutdown()
    return result


def train_plainly(case, masks_of):
    """(losses of every update by microbatch, scale); masks_of[update] as from `train`.

    Masters start from the values in 16 bits, as a converted model has no others.
    """
    model = made(case.kind)
    narrow = {"bf16": BF16, "fp16": F16}.get(case.mode)
    if narrow is not None:
        model.to(narrow)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.float()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = sgd(masters)
    dtype, scale = case.autocast_dtype, SCALE if case.mode == "fp16" else 1.0
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=SCALE, growth_interval=8, enabled=case.mode == "scaler"
    )
    losses = []
    for number, masks in enumerate(masks_of):
        inputs, target = data(case.kind, number)
        if narrow is not None:
            inputs = {n: v.to(narrow) if v.is_floating_point() else v for n, v in inputs.items()}
        totals, found = [torch.zeros_like(m) for m in masters], []
        for given in masks:
            model.give(given)
            with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
                loss = loss_of(called(model, inputs)[0], target)
            scaled = scaler.scale(loss) * scale
            gradients = torch.autograd.grad(scaled, list(model.parameters()))
            part = case.passes / NUM_PARTS / scale
            totals = [t + g.float() * part for t, g in zip(totals, gradients, strict=True)]
            found.append(loss.item())
        losses.append(found)
        for master, total in zip(masters, totals, strict=True):
            master.grad = total
        scaler.unscale_(optimizer)
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(masters, case.max_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, scaler.get_scale()


def worst(found, expected):
    """Largest difference of the mean losses, in units of the first."""
    pairs = zip(found, expected, strict=True)
    return max(abs(sum(f) - sum(e)) for f, e in pairs) / sum(expected[0])


def joined(results):
    """Losses and masks of all replicas, by update."""
    by_replica = {}
    for replica, *found in results:
        by_replica.setdefault(replica, found)
    parts = [by_replica[replica] for replica in sorted(by_replica)]
    losses, masks = (
        [[part for replica in parts for part in replica[kind][n]] for n in range(NUM_STEPS)]
        for kind in (0, 1)
    )
    return losses, masks


def check(case):
    results = run_ranks(
        train, case.replicas * case.stages, case, env={"MPXLA_DEVICE": case.backend}
    )
    losses, masks = joined(results)
    expected, scale = train_plainly(case, masks)
    assert {result[-1] for result in results} == {scale}
    found = worst(losses, expected)
    print(f"{case}: losses differ by {found:.2g}")
    assert found < BOUND, (losses, expected)
    assert sum(losses[-1]) < 0.95 * sum(losses[0]), "it learns"


SLOW = [
    Case("bf16", "llama", stages=3, max_norm=0.5),
    Case("bf16", "bert", stages=4),
    Case("bf16", "vit", replicas=2, stages=2, is_sharded=True),
    Case("bf16", "conv", stages=2, passes=2),
    Case("bf16", "gpt", replicas=2, is_sharded=True, max_norm=0.5, passes=2),
    Case("fp16", "gpt", replicas=2, stages=2, is_sharded=True, max_norm=0.5),
    Case("fp16", "llama"),
    Case("fp16", "bert", replicas=2),
    Case("fp16", "vit", stages=4),
    Case("fp16", "conv", stages=2, passes=2),
    Case("autocast", "gpt", stages=4),
    Case("autocast", "llama", replicas=2, stages=2, is_sharded=True, max_norm=0.5),
    Case("autocast", "bert", passes=2),
    Case("autocast", "vit", stages=3),
    Case("autocast", "conv", replicas=2),
    Case("scaler", "gpt", stages=2, max_norm=0.5),
    Case("scaler", "conv", replicas=2, stages=2, passes=2),
    Case("bf16", "gpt", stages=2, backend="pjrt"),
    Case("fp16", "bert", replicas=2, is_sharded=True, backend="pjrt"),
    Case("autocast", "conv", stages=2, backend="pjrt"),
    Case("scaler", "vit", backend="pjrt", max_norm=0.5),
]


@pytest.mark.parametrize(
    "case",
    [Case("bf16", "gpt", stages=2), *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)],
    ids=str,
)
def test_losses_are_those_of_plain_pytorch(case):
    check(case)
