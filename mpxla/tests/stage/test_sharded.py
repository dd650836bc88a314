"""Stages that take parts of parameters: numbers, turns, and what is saved. Ranks are threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.transport import Members
from mpxla.config import Config
from mpxla.device.eager import EagerBackend
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.graph.collectives import is_collective
from mpxla.runtime.plans.cut import cut_step
from mpxla.stage.collective import CollectiveRunner
from mpxla.stage.flat import SHARDING_GROUP, FlatShard
from mpxla.stage.lower import TracedStage
from mpxla.stage.pieces import DEPARTURE, TURN, CollectivePiece, ComputePiece, annotate, split_graph
from mpxla.stage.sharded import divide_stage
from mpxla.stage.spec import TensorSpec
from mpxla.stage.split_backward import split_backward
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.test_parity_sharded import Block, Model, batch_of, loss_of

pytestmark = pytest.mark.unit

c10d = torch.ops._c10d_functional
RANKS = (0, 1)


def build():
    torch.manual_seed(1)
    return Model(3)


def captured(model, ids, autocast=False, pins=(), stage=0):
    def step(leaves):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, *leaves)
        current_recorder().backward(loss, None)
        return loss

    names = {n: n for n, _ in model.named_parameters(remove_duplicate=False)}
    names["head.weight"] = "embedding.weight"
    graph = capture_step(ToCapture(step, model, [ids], names))
    degree = 2 if pins else 1
    config = Config(pipeline_parallel_degree=degree, auto_partition=False, default_partition=0)
    placed = dict.fromkeys(pins, 1)
    return cut_step(graph, config, EagerBackend().lowering, placed, None).stages[stage]


def lowered_for(index, spec, model, max_live=10**9, share=1.0, keeps_whole=False):
    shards = {
        name: FlatShard(tuple(p.shape), index, len(RANKS))
        for name, p in model.named_parameters()
        if p.numel() >= 16
    }
    divided = {} if keeps_whole else shards
    stage = TracedStage(spec, True, EagerBackend().lowering, divided=divided).lowered(share)
    return divide_stage(stage, divided, shards, max_live), shards


def run_on(spec, model, lowered, shards, ids, transport):
    """Loss and gradients of one rank: parts of those of divided parameters."""
    backend, groups = EagerBackend(), {SHARDING_GROUP: Members(RANKS, transport)}
    forward = backend.compile("forward", lowered.forward, lowered.forward_inputs, groups=groups)
    inputs = lowered.backward_inputs
    graph = lowered.backward.flat(inputs, backend.device)
    backward = backend.compile("backward", graph, inputs, groups=groups)
    held = dict(model.named_parameters())
    specs = zip(spec.parameters, lowered.forward_inputs, strict=False)
    arguments = [
        (held[name] if held[name].shape == taken.shape else shards[name].take(held[name])).detach()
        for name, taken in specs
    ] + [ids]
    outputs = forward(arguments)
    kept = outputs[len(outputs) - lowered.num_saved :]
    saved = [arguments[s.argument] if s.output is None else kept[s.output] for s in lowered.saved]
    zeros = [torch.zeros(s.shape, dtype=s.dtype) for s in lowered.accumulators]
    found = backward([*zeros, *saved, torch.ones(())])
    return outputs[0], dict(zip(spec.trained, found, strict=False)), shards


@pytest.mark.parametrize(
    "keeps_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["parts", "whole"]
)
def test_gradients_are_means_over_the_group(keeps_whole):
    model = build()
    batches = batch_of(0, 1).chunk(2)
    spec = captured(model, batches[0])
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda lowered, ids, world: run_on(spec, model, *lowered, ids, world),
                # Torch traces in one thread.
                [lowered_for(index, spec, model, keeps_whole=keeps_whole) for index in RANKS],
                batches,
                threads_world(2),
                timeout=60,
            )
        )
    losses = [loss_of(model, ids) for ids in batches]
    torch.testing.assert_close([f[0] for f in found], [x.detach() for x in losses])
    (sum(losses) / 2).backward()
    gradients = dict(model.named_parameters())
    for index, (_, own, shards) in enumerate(found):
        assert {"blocks.0.up.bias", "embedding.weight"} < set(shards)
        assert "blocks.0.norm.weight" not in shards
        for name, shard in shards.items():
            expected = shard.take(gradients[name].grad)
            assert shard.index == index
            torch.testing.assert_close(own[name], expected)
    whole = [f[1]["blocks.0.norm.weight"] for f in found]
    torch.testing.assert_close((whole[0] + whole[1]) / 2, gradients["blocks.0.norm.weight"].grad)


def kind_of(node):
    return CollectivePiece if is_collective(node) else ComputePiece


def pieces_of(lowered):
    backward = lowered.backward.flat(lowered.backward_inputs, torch.device("cpu"))
    inputs = lowered.forward_inputs, lowered.backward_inputs
    for module, specs in zip((lowered.forward, backward), inputs, strict=True):
        annotate(module, specs)
        yield split_graph(module, kind_of)


def gathered_by(piece):
    """Elements that a piece gathers, by turn."""
    found = {}
    for node in piece.module.graph.nodes:
        if TURN in node.meta:
            turn = node.meta[TURN].number
            found[turn] = found.get(turn, 0) + node.meta["val"].numel()
    return found


@pytest.mark.parametrize("max_live", [10**9, 1], ids=["overlapping", "alone"])
def test_a_turn_is_a_block_and_waits_for_the_one_before_the_last(max_live):
    model = build()
    ids = batch_of(0, 1)
    lowered, shards = lowered_for(0, captured(model, ids), model, max_live=max_live)
    block = sum(s.num_elements for n, s in shards.items() if n.startswith("blocks.0"))
    embedding = shards["embedding.weight"].num_elements
    back = 2 if max_live > 1 else 1
    forward = [embedding, *[block + 1] * 3, embedding]  # the bias of 25 travels as 26 elements
    for plan, num_turns in zip(pieces_of(lowered), (5, None), strict=True):
        turns = [gathered_by(piece) for piece in plan.pieces]
        assert all(len(turn) <= 1 for turn in turns)
        sizes = [size for turn in turns for size in turn.values()]
        assert num_turns is None or sizes == forward
        assert max(sizes) <= block + 1
        computed = []
        for piece, turn in zip(plan.pieces, turns, strict=True):
            if isinstance(piece, ComputePiece):
                computed.append(piece)
            elif turn and len(computed) >= back:
                awaited = set(piece.inputs) & set(computed[-back].outputs)
                assert awaited, "it waits for the computation before"
        whole = {n: i for i, t in enumerate(turns) if t for n in plan.pieces[i].outputs}
        starts = [i for i, turn in enumerate(turns) if turn]
        for i, piece in enumerate(plan.pieces):
            for number in set(piece.inputs) & set(whole):
                later = [start for start in starts if whole[number] < start < i]
                assert len(later) <= 1, "no more than two turns are whole"


def scattered_by(piece):
    """Turns of what a piece takes away."""
    nodes = piece.module.graph.nodes
    return [node.meta[DEPARTURE].number for node in nodes if DEPARTURE in node.meta]


@pytest.mark.parametrize(
    "keeps_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["parts", "whole"]
)
@pytest.mark.parametrize(
    "max_live", [10**9, pytest.param(1, marks=pytest.mark.slow)], ids=["overlapping", "alone"]
)
def test_gradients_leave_block_by_block(max_live, keeps_whole):
    model = build()
    ids = batch_of(0, 1)
    lowered, _ = lowered_for(
        0, captured(model, ids), model, max_live=max_live, keeps_whole=keeps_whole
    )
    weights = {p.numel() for p in model.blocks.parameters() if p.dim() == 2}
    _, backward = pieces_of(lowered)
    turns = [number for piece in backward.pieces for number in scattered_by(piece)]
    assert sorted(turns) == turns
    assert len(set(turns)) == len(model.blocks) + 1
    together = [set(found) for piece in backward.pieces if (found := scattered_by(piece))]
    assert all(len(found) == 1 for found in together[:-1])  # nothing computes beside the last
    last = {n: i for i, done in enumerate(backward.last_uses()) for n in done}
    most = 0
    for i in range(len(backward.pieces)):
        alive = [
            spec
            for other in backward.pieces[: i + 1]
            if isinstance(other, ComputePiece)
            for n, spec in zip(other.outputs, other.output_specs, strict=True)
            if last.get(n, 0) >= i and torch.Size(spec.shape).numel() in weights
        ]
        most = max(most, len(alive))
    of_block = 2
    assert most == (of_block if max_live == 1 else 2 * of_block), "whole gradients between pieces"


def test_nothing_that_is_saved_is_a_whole_parameter():
    model = build()
    spec = captured(model, batch_of(0, 1), autocast=True)
    lowered, _ = lowered_for(0, spec, model)
    sizes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    sizes |= {shape[::-1] for shape in sizes}
    assert not sizes & {s.shape for s in lowered.saved_specs}


class Counting:
    """A transport of rank 0 of two, whose partner gives the same; what was asked of it, by name."""

    def __init__(self):
        self.rank, self.calls = 0, []

    def all_gather(self, tensor, ranks):
        return self._done("all_gather", torch.stack([tensor, tensor]))

    def reduce_scatter(self, tensor, ranks):
        return self._done("reduce_scatter", 2 * tensor[0])

    def _done(self, name, value):
        self.calls.append(name)
        handle = Handle(FailureWatch(0), name)
        handle.set_result(value)
        return handle


def test_a_turn_travels_as_one_message():
    model = build()
    lowered, _ = lowered_for(0, captured(model, batch_of(0, 1)), model)
    transport = Counting()
    groups = {SHARDING_GROUP: Members(RANKS, transport)}
    expected = []
    for plan in pieces_of(lowered):
        for piece in plan.pieces:
            if isinstance(piece, CollectivePiece):
                runner = CollectiveRunner("piece", piece, groups, torch.Tensor.detach, list)
                found = runner([torch.zeros(s.shape, dtype=s.dtype) for s in piece.input_specs])
                assert [TensorSpec.of(value) for value in found] == list(piece.output_specs)
                expected += ["all_gather"] * bool(gathered_by(piece))
                expected += ["reduce_scatter"] * bool(scattered_by(piece))
    assert transport.calls == expected
    assert len(expected) > 3 * len(model.blocks)


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.0])
def test_all_ranks_gather_the_same_together(share):
    """Biases of 25 elements are padded on the second rank, and travel as they do on the first."""
    model = build()
    spec = captured(model, batch_of(0, 1), pins=("model.blocks.3",))
    of_ranks = [
        [
            [
                (node.target, node.meta["val"].shape)
                for node in piece.module.graph.nodes
                if is_collective(node)
            ]
            for plan in pieces_of(lowered_for(index, spec, model, share=share)[0])
            for piece in plan.pieces
        ]
        for index in RANKS
    ]
    assert of_ranks[0] == of_ranks[1]


class Straight(Block):
    """Without a function between the products, whose derivative would need what they give."""

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


def test_both_parts_of_a_split_backward_gather():
    model = build()
    model.blocks = torch.nn.ModuleList(Straight() for _ in range(4))
    pins = ("model.blocks.1", "model.blocks.2")
    spec = captured(model, batch_of(0, 1), pins=pins, stage=1)
    lowered, _ = lowered_for(0, spec, model, share=0.0)  # both need the weights to compute again
    split = split_backward(lowered, torch.device("cpu"))
    graphs = [part.graph.graph for part in (split.input_part, split.weight_part)]
    assert all(any(TURN in node.meta for node in graph.nodes) for graph in graphs)
    sizes = {p.numel() for p in model.parameters() if p.dim() == 2}
    assert not sizes & {torch.Size(s.shape).numel() for s in split.crossing}
    turns = []
    for part in (split.input_part, split.weight_part):
        annotate(part.graph, part.inputs)
        pieces = split_graph(part.graph, kind_of).pieces
        turns.append([set(scattered_by(piece)) for piece in pieces if scattered_by(piece)])
    assert turns[0] == [] and set().union(*turns[1]) == {0, 1}


def test_parts_fit_together():
    tensor = torch.arange(9.0).view(3, 3)
    shards = [FlatShard((3, 3), index, 2) for index in range(2)]
    parts = [shard.take(tensor) for shard in shards]
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    padded = [s.padded(p) for s, p in zip(shards, parts, strict=True)]
    assert torch.equal(shards[0].join(padded), tensor)
    fits = {count: FlatShard.fits(count, 4) for count in (0, 3, 4, 5, 8)}
    assert fits == {0: False, 3: False, 4: True, 5: False, 8: True}
