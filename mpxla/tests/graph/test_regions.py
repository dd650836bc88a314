"""Which nodes of a captured step belong to checkpointed regions, and where regions may be cut."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mpxla.cli.factory import capture_factory
from mpxla.errors import MpxlaError, PartitionError
from mpxla.graph.regions import check_regions, region_of
from mpxla.graph.stepgraph import module_path
from mpxla.parallel.checkpointing import (
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)

pytestmark = pytest.mark.unit


class Stack(nn.Module):
    """Four layers between two others; how the middle runs is the test's choice."""

    def __init__(self, run=None):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 5), nn.Linear(5, 2)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
        self.run = run

    def forward(self, x):
        x = self.enter(x)
        x = self.layers(x) if self.run is None else self.run(self.layers, x)
        return self.leave(x)


def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def regions(model, x=None):
    """Module path -> index of its region, of the linear layers; names of all regions."""
    step = capture_factory(model, (torch.ones(2, 3) if x is None else x,), train)
    found: dict[object, int] = {}
    paths = {}
    for node in step.graph.nodes:
        if "linear" in str(node.target) or "addmm" in str(node.target):
            region = region_of(node)
            index = None if region is None else found.setdefault(region, len(found))
            paths[module_path(node).removeprefix("model.")] = index
    return paths, list(found)


LAYERS = [f"layers.{i}.0" for i in range(4)]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_of_torch_is_one_region(is_reentrant):
    paths, found = regions(Stack(partial(torchs_checkpoint, use_reentrant=is_reentrant)))
    assert paths == {"enter": None, **dict.fromkeys(LAYERS, 0), "leave": None}
    assert found[0].name == "Sequential" and not found[0].is_module


def test_only_the_outermost_of_nested_regions_counts():
    def run(layers, x):
        def body(x):
            return torchs_checkpoint(layers[1], layers[0](x), use_reentrant=False)

        return layers[2:](torchs_checkpoint(body, x, use_reentrant=False))

    paths, found = regions(Stack(run))
    assert [paths[path] for path in LAYERS[:2]] == [0, 0] and len(found) == 1


def test_a_region_keeps_its_selective_policy():
    run = partial(
        torchs_checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    )
    (region,) = regions(Stack(run))[1]
    assert region.policy(None, torch.ops.aten.mm.default).name == "MUST_SAVE"
    assert region.policy(None, torch.ops.aten.tanh.default).name == "PREFER_RECOMPUTE"


def test_autocast_and_no_grad_do_not_lose_a_region():
    def body(layers, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = layers[:2](x)
        with torch.no_grad():
            shift = layers[2](x).mean()
        return layers[3](x + shift)

    def run(layers, x):
        return torchs_checkpoint(partial(body, layers), x, use_reentrant=False).float()

    paths, found = regions(Stack(run))
    assert len(found) == 1 and all(paths[path] == 0 for path in LAYERS)


def test_marked_modules_and_functions_of_smp():
    model = Stack()
    set_activation_checkpointing(model.layers[1])
    paths, found = regions(model)
    assert paths == {**dict.fromkeys(["enter", *LAYERS, "leave"]), "layers.1.0": 0}
    assert len(found) == 1, "a sequence of two layers, of which one has no linear operator"
    assert (found[0].layers.group_size, found[0].layer, found[0].is_module) == (1, 0, True)
    linear = Stack()
    set_activation_checkpointing(linear.leave)
    paths, found = regions(linear)
    assert paths["leave"] == 0 and found[0].layers is None
    paths, found = regions(Stack(checkpoint))
    assert [paths[path] for path in LAYERS] == [0, 0, 0, 0] and found[0].is_module


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        *(("contiguous", None), ("group_3", 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("each", 1), ("group_12", 12))),
    ],
)
def test_strategies_of_sequences(strategy, size):
    marked = Stack()
    set_activation_checkpointing(marked.layers, strategy=strategy)
    called = Stack(partial(checkpoint_sequential, strategy=strategy))
    for model in (marked, called):
        paths, found = regions(model)
        assert [paths[path] for path in LAYERS] == [0, 1, 2, 3]
        assert [region.layer for region in found] == [0, 1, 2, 3]
        assert {region.layers for region in found} == {found[0].layers}
        assert found[0].layers.group_size == size


def test_marks_for_one_call_are_taken_away():
    model = Stack(checkpoint)
    set_activation_checkpointing(model.layers, strategy="group_2")
    before = dict(model.layers.__dict__)
    regions(model)
    assert model.layers.__dict__ == before


def test_outside_of_steps_torch_computes_again():
    torch.manual_seed(0)
    model, x = Stack(checkpoint_sequential), torch.randn(2, 3)
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    model(x).sum().backward()
    found, model.run = model.enter.weight.grad, None
    assert len(calls) == 8, "every layer ran twice"
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(found, model.enter.weight.grad)


@pytest.mark.parametrize("strategy", ["all", "group_0", "group_", "group_1.5", None, 2])
def test_unknown_strategies_are_refused(strategy):
    for call in (set_activation_checkpointing, partial(checkpoint_sequential, input=None)):
        with pytest.raises(MpxlaError, match="there is no strategy") as caught:
            call(nn.Sequential(nn.Linear(1, 1)), strategy=strategy)
        assert "Give each, contiguous or group_<x>" in str(caught.value)


def test_what_is_no_module_is_refused():
    with pytest.raises(MpxlaError, match="takes a module of the model, not a function"):
        set_activation_checkpointing(train)
    with pytest.raises(MpxlaError, match="checkpoint takes a module of the model, not a function"):
        checkpoint(train, torch.ones(1))
    with pytest.raises(MpxlaError, match=r"takes an nn\.Sequential, not a Linear; use checkpoint"):
        checkpoint_sequential(nn.Linear(1, 1), torch.ones(1))


def cut_in_the_middle(model, ranks=(0, 1)):
    """The step, and stages of its nodes: all from the second layer on are on stage 1."""
    step = capture_factory(model, (torch.ones(2, 3),), train)
    names = [module_path(node) for node in step.graph.nodes]
    first = next(i for i, name in enumerate(names) if "layers.2" in name)
    nodes = list(step.graph.nodes)
    stages = {n: (int(i >= first),) for i, n in enumerate(nodes) if n.op == "call_function"}
    return step, stages, ranks


def test_a_module_on_two_ranks_is_an_error_if_placed_by_hand_and_else_told():
    step, stages, ranks = cut_in_the_middle(Stack(checkpoint))
    with pytest.raises(PartitionError, match=r"checkpointed module model\.layers has parts") as e:
        check_regions(step, stages, ranks, is_manual=True)
    assert "on pipeline ranks 0, 1. Place all of it on one (smp.partition" in str(e.value)
    (line,) = check_regions(step, stages, ranks, is_manual=False)
    assert "module model.layers was cut between pipeline ranks 0, 1: each keeps" in line
    assert not check_regions(step, stages, (0, 0), is_manual=True), "two stages of one rank"


def test_sequences_and_torchs_checkpoints_may_be_cut():
    for run in (checkpoint_sequential, partial(torchs_checkpoint, use_reentrant=False)):
        step, stages, ranks = cut_in_the_middle(Stack(run))
        assert check_regions(step, stages, ranks, is_manual=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_transformers_checkpoint_their_layers(offload):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 20}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model.train().activation_checkpointing_enable(offload=offload)

    def predict(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)
        return loss

    step = capture_factory(model, (torch.zeros(2, 6, dtype=torch.int64),), predict)
    layers: dict[object, set[str]] = {}
    for node in step.graph.nodes:
        region, path = region_of(node), module_path(node)
        if "layers." in path and node.op == "call_function":
            layers.setdefault(region, set()).add(path.split("layers.")[1][0])
    assert sorted(map(sorted, layers.values())) == [["0"], ["1"], ["2"]] and None not in layers
