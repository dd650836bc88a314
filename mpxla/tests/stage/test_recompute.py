"""What lowered stages keep and compute again; values are those of autograd."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mpxla.cli.factory import capture_factory
from mpxla.config import Config
from mpxla.graph.stepgraph import is_random
from mpxla.parallel.checkpointing import set_activation_checkpointing
from mpxla.runtime.plans.activations import recomputed_nodes
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.saved import saved_bytes
from mpxla.stage.lower import TracedStage
from mpxla.tests.device.null import plain_lowering

pytestmark = pytest.mark.unit

WIDTH, ROWS = 8, 6
BLOCK_INPUT = WIDTH * ROWS * 4
"""Bytes of what one block hands to the next."""


class Block(nn.Module):
    def __init__(self, drop=0.0, returns_view=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.returns_view = drop, returns_view

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        if self.drop:
            hidden = hidden * (torch.rand(ROWS, 4 * WIDTH) > self.drop)
        x = x + self.down(hidden)
        return x.view(2, ROWS // 2, WIDTH).view(ROWS, WIDTH) if self.returns_view else x


class Blocks(nn.Module):
    def __init__(self, count=8, run=None, **options):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(**options) for _ in range(count)))
        self.run = run

    def forward(self, x):
        for block in self.blocks if self.run else ():
            x = self.run(block, x)
        return x if self.run else self.blocks(x)


def train(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def traced(model):
    torch.manual_seed(0)
    step = capture_factory(model, (torch.randn(ROWS, WIDTH),), train)
    cut = cut_step(step, Config(pipeline_parallel_degree=1), plain_lowering(), {}, None)
    return TracedStage(cut.stages[0], True, plain_lowering())


def marked(count=8, strategy="each", **options):
    model = Blocks(count, **options)
    set_activation_checkpointing(model.blocks, strategy=strategy)
    return model


def num_products(lowered):
    graph = lowered.backward.derivative.graph
    return sum(
        n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in graph.nodes
    )


def gradients(model, lowered):
    """Gradients of the blocks' weights from the programs, on this machine; and the loss."""
    values = dict(model.named_parameters())
    torch.manual_seed(3)
    x = torch.randn(ROWS, WIDTH)
    spec = lowered.spec
    arguments = [*(values[n].detach() for n in spec.parameters), *(x for _ in spec.inputs)]
    torch.manual_seed(4)
    found = list(lowered.forward(*arguments))
    kept = found[len(found) - lowered.num_saved :]
    saved = [arguments[s.argument] if s.output is None else kept[s.output] for s in lowered.saved]
    sums = [torch.zeros_like(values[n]) for n in spec.trained]
    backward = lowered.backward.flat(lowered.backward_inputs, torch.device("cpu"))
    results = backward(*sums, *saved, torch.ones(()))
    return dict(zip(spec.trained, results, strict=False)), found[0], x


def assert_right(model, stage, share):
    found, loss, x = gradients(model, stage.lowered(share))
    everything, same_loss, _ = gradients(model, stage.lowered(1.0))
    assert torch.equal(loss, same_loss)
    for name, value in found.items():
        assert torch.equal(value, everything[name]), name
    model.zero_grad()
    torch.manual_seed(4)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("returns_view", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_keeps_the_inputs_of_blocks(returns_view):
    model = marked(returns_view=returns_view)
    stage = traced(model)
    lowered = stage.lowered()
    # The last block's result is read by the loss, but that block is computed again anyway.
    assert saved_bytes(lowered) == 8 * BLOCK_INPUT
    everything = traced(Blocks()).lowered()
    assert saved_bytes(everything) > 5 * saved_bytes(lowered)
    # What a block ends with is not needed for its derivative, but for that of the loss.
    assert num_products(lowered) == num_products(everything) + 9
    assert len(recomputed_nodes(lowered)) == 9 and not recomputed_nodes(everything)
    assert_right(model, stage, 1.0)


@pytest.mark.parametrize(
    ("strategy", "inputs"),
    [
        ("contiguous", 1),
        ("group_3", 3),
        pytest.param("group_4", 2, marks=pytest.mark.slow),
        pytest.param("group_99", 1, marks=pytest.mark.slow),
    ],
)
def test_groups_keep_the_inputs_of_groups(strategy, inputs):
    assert saved_bytes(traced(marked(strategy=strategy)).lowered()) == inputs * BLOCK_INPUT


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchs_checkpoints_keep_the_same(is_reentrant):
    def run(block, x):
        if is_reentrant and not x.requires_grad:  # else blocks get no gradient, as in PyTorch
            x = x.detach().requires_grad_()
        return checkpoint(block, x, use_reentrant=is_reentrant)

    model = Blocks(run=run)
    assert saved_bytes(traced(model).lowered()) == 8 * BLOCK_INPUT


def test_a_policy_keeps_what_it_names():
    operators = [torch.ops.aten.addmm.default]
    context = partial(create_selective_checkpoint_contexts, operators)
    run = partial(checkpoint, use_reentrant=False, context_fn=context)
    lowered = traced(Blocks(4, run)).lowered()
    assert not recomputed_nodes(lowered)
    everything, nothing = traced(Blocks(4)).lowered(), traced(marked(4)).lowered()
    assert saved_bytes(nothing) < saved_bytes(lowered) <= saved_bytes(everything)


def test_masks_are_kept_in_one_byte_and_not_drawn_again():
    model = marked(4, drop=0.3)
    stage = traced(model)
    masks = 4 * ROWS * 4 * WIDTH
    assert saved_bytes(stage.lowered()) == 4 * BLOCK_INPUT + masks
    assert saved_bytes(stage.lowered(0.0)) == BLOCK_INPUT + masks
    for share in (1.0, 0.4, 0.0):
        assert not any(map(is_random, stage.lowered(share).backward.derivative.graph.nodes))
        assert_right(model, stage, share)


def test_smaller_shares_keep_less_and_compute_more():
    model = Blocks(6)
    stage = traced(model)
    shares = (1.0, 0.6, 0.3, 0.0)
    lowered = [stage.lowered(share) for share in shares]
    sizes = [saved_bytes(one) for one in lowered]
    products = [num_products(one) for one in lowered]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert sizes[-1] == BLOCK_INPUT, "the input of the stage"
    assert products == sorted(products) and products[-1] == products[0] + 12
    for share in shares:
        assert_right(model, stage, share)


def test_a_value_that_two_regions_share_is_kept_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = Block(), Block(), Block()

        def forward(self, x):
            bias = self.first(x)
            return self.third(self.second(bias + 1) * bias) + bias

    model = Shared()
    for block in (model.first, model.second, model.third):
        set_activation_checkpointing(block)
    stage = traced(model)
    # x, bias + 1 (from which bias does not follow bit for bit), their product, and bias itself.
    assert saved_bytes(stage.lowered()) == 4 * BLOCK_INPUT
    assert_right(model, stage, 1.0)
