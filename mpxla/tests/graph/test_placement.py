"""Nodes know their modules and lines in every mode, and a placement that cannot hold is refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpxla.errors import PartitionError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.placement import check_placement, rank_of
from mpxla.graph.stepgraph import module_path
from mpxla.graph.user_code import line_of
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

AROUND = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("xla", dtype=torch.bfloat16),
    "autocast of the host": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without effect": lambda: torch.autocast("xla", enabled=False),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "no_grad in autocast": lambda: both(torch.no_grad(), AROUND["autocast"]()),
    "inference_mode": torch.inference_mode,
}


@contextlib.contextmanager
def both(inner, outer):
    with outer, inner:
        yield


class Block(nn.Module):
    """Runs its second layer under a mode."""

    def __init__(self, mode="nothing"):
        super().__init__()
        self.mode = mode
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if self.mode == "checkpoint":
            return checkpoint(self.second, x, use_reentrant=False)
        with AROUND[self.mode]():
            y = self.second(x)
        return x + y


def capture(model, around="nothing"):
    def step(leaves):
        with AROUND[around]():
            y = model(leaves[0])
        loss = y.float().square().mean()
        if loss.requires_grad:
            current_recorder().backward(loss)
        return loss

    leaves = [TensorLeaf((2, 4), torch.float32)]
    return capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))


def linears(step):
    """Module path and line of every linear layer."""
    found = [n for n in step.graph.nodes if n.target is torch.ops.aten.linear.default]
    return [module_path(node) for node in found], [line_of(node) for node in found]


QUICK = [
    *(("nothing", inside) for inside in ("autocast", "no_grad", "checkpoint")),
    *(("autocast", "nothing"), ("no_grad", "nothing"), ("autocast", "no_grad")),
]
MODES = [
    *((around, "nothing") for around in AROUND),
    *(("nothing", inside) for inside in [*AROUND, "checkpoint"]),
    ("autocast", "checkpoint"),
    ("autocast", "no_grad"),
    ("autocast", "autocast without effect"),
]


@pytest.mark.parametrize(
    ("around", "inside"),
    [pytest.param(*modes, marks=[pytest.mark.slow] * (modes not in QUICK)) for modes in MODES],
)
def test_nodes_know_their_module_in_every_mode(around, inside):
    step = capture(nn.Sequential(Block(inside), Block()), around)
    paths, lines = linears(step)
    assert paths == ["model.0.first", "model.0.second", "model.1.first", "model.1.second"]
    assert all("test_placement.py" in line for line in lines), lines
    assert lines[0].endswith(": x = self.first(x)")


def test_innermost_placed_module():
    pins = {"model.a": 1, "model.a.b": 0}
    assert [rank_of(p, pins) for p in ("model.a.c", "model.a.b.c", "model.ab", "model", "")] == [
        1, 0, None, None, None,
    ]  # fmt: skip


class Bypassed(nn.Module):
    """Reads the weight of a layer that it never calls."""

    def __init__(self, calls=False):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = calls

    def forward(self, x):
        x = self.body(x)
        return self.head(x) if self.calls else F.linear(x, self.head.weight)


def check(model, pins, default=0):
    check_placement(capture(model), pins, default, ModelState(model).canonical_names)


def test_placed_module_without_a_node():
    with pytest.raises(
        PartitionError,
        match=r"module 'model\.head' is placed on partition 1, but the step never calls it: its "
        r"parameter 'head\.weight' is read by the module 'model', which is on partition 0 at "
        r".*test_placement\.py:\d+: return self\.head\(x\) if .* put both on the same partition",
    ):
        check(Bypassed(), {"model.head": 1})
    check(Bypassed(), {"model.head": 1}, default=1)
    check(Bypassed(), {"model.head": 1, "model": 1})
    check(Bypassed(calls=True), {"model.head": 1})


def test_placed_modules_that_need_no_node():
    attention = nn.MultiheadAttention(4, 2)  # reads the weights of its out_proj by itself

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.unused = attention, nn.Linear(4, 4)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    pins = {f"model.{p}": 1 for p in ("attention", "attention.out_proj")} | {"model.unused": 1}
    check(Around(), pins)
    tied = Bypassed()
    tied.body.weight = tied.head.weight
    check(tied, {"model.head": 1})
