"""What a step keeps for its backward: the tensors that lowering saves, by the nodes that read them.

Which tensors a stage saves is decided when it is lowered (some are computed again), that is, after
the cut that wants to know it. But the decision is a local one. So before a step is cut, it is
lowered in *windows*, runs of operations of about a block's size, and every saved tensor is laid to
the operations whose derivatives read it. A stage then keeps what its operations read. Equal windows
(the blocks of a transformer) are lowered once, which takes a fraction of lowering the whole step.

Layouts for speed (`stage/layout.py`) change weights and gradients only, not what is saved.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpxla.device.backend import Lowering
from mpxla.graph.partition.words import SavedTensor
from mpxla.graph.regions import Region, region_of
from mpxla.graph.split import split_stages
from mpxla.graph.stepgraph import StepGraph, module_path
from mpxla.graph.typed import input_of, outputs_of
from mpxla.schedule.analysis import StageBytes
from mpxla.stage.cleanup import is_view
from mpxla.stage.lower import LoweredStage, TracedStage
from mpxla.stage.spec import StageSpec
from mpxla.stage.split_backward import SplitBackward

__all__ = ["held_bytes", "saved_bytes", "saved_tensors"]

LARGEST_WINDOW = 64
"""Operations of a window, at most."""
SMALLEST_MODULE = 16
"""Operations of a module that is a window of its own; smaller ones share windows."""


def saved_tensors(step: StepGraph, lowering: Lowering) -> dict[str, tuple[SavedTensor, ...]]:
    """What the derivative of every node reads, of one microbatch.

    Returns:
        Name of a node -> the tensors; nodes that read nothing are left out.
    """
    if not step.is_training:
        return {}
    stages_of, count = _windows(step)
    known: dict[object, list[_Saved]] = {}
    found: dict[str, dict[SavedTensor, None]] = defaultdict(dict)
    for window in split_stages(step, stages_of, count):
        if not window.has_backward:
            continue
        key = _key(window)
        if key not in known:
            known[key] = list(_saved_by(TracedStage(window, True, lowering).lowered()))
        names = [node.name for node in window.graph.nodes]
        for saved in known[key]:
            tensor = SavedTensor(saved.name_in(window), saved.num_bytes)
            for reader in saved.readers:
                found[names[reader]][tensor] = None
    return {name: tuple(tensors) for name, tensors in found.items()}


def saved_bytes(lowered: LoweredStage) -> int:
    """What a stage keeps of one microbatch, each tensor once."""
    passed_on = {s.argument for s in lowered.saved if s.argument is not None}
    return sum(spec.num_bytes for spec in lowered.saved_specs) + sum(
        lowered.forward_inputs[a].num_bytes for a in passed_on if lowered.spec.is_of_microbatch(a)
    )


def held_bytes(lowered: LoweredStage, split: SplitBackward | None, has_inputs: bool) -> StageBytes:
    """What a stage keeps of one microbatch.

    Args:
        lowered: the stage.
        split: the two parts of its backward, if it is split.
        has_inputs: whether the inputs of the step are on its rank, for all of the step.
    """
    saved = saved_bytes(lowered)
    moved = saved - _input_bytes(lowered) if has_inputs else saved
    if split is None:
        return StageBytes(saved, saved, 0, moved)
    if split.weight_part is None:
        return StageBytes(saved, 0, 0, moved)
    inputs = [
        spec.num_bytes * lowered.spec.is_of_microbatch(argument)
        for argument, spec in enumerate(lowered.forward_inputs)
    ]
    outputs = [spec.num_bytes for spec in lowered.saved_specs]
    own = [s.among(inputs, outputs) for s in lowered.saved]
    count = lowered.num_accumulators + len(own)
    grads = [spec.num_bytes for spec in lowered.backward_inputs[count:-1]]  # without the seed
    sizes = [*own, *grads, 0]
    places = {}
    for place in split.weight_part.arguments:  # a value may be saved for several readers
        places[lowered.saved[place] if place < len(own) else place] = place
    new = sum(sizes[place] for place in places.values() if place >= len(own))
    kept = sum(sizes[place] for place in places.values())
    return StageBytes(saved, split.crossing_bytes + kept, split.crossing_bytes + new, moved)


def _input_bytes(lowered: LoweredStage) -> int:
    """Bytes of the step's inputs that a stage keeps, each once."""
    first, ports = lowered.spec.first_input, lowered.spec.inputs
    own = {s.argument for s in lowered.saved if s.argument is not None and s.argument >= first}
    return sum(lowered.forward_inputs[a].num_bytes for a in own if ports[a - first].source is None)


# --- windows -------------------------------------------------------------------------------------


def _windows(step: StepGraph) -> tuple[dict[fx.Node, tuple[int]], int]:
    """Window of every operation, in program order, and how many there are."""
    nodes = [node for node in step.graph.nodes if node.op not in ("placeholder", "output")]
    sizes = Counter(prefix for node in nodes for prefix in _prefixes(node))
    window_of: dict[fx.Node, tuple[int]] = {}
    number, size, home = -1, len(nodes), ""
    for node in nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and not isinstance(source.meta["val"], torch.Tensor):
            window_of[node] = window_of[source]  # picks one of several results
            continue
        fitting = (p for p in _prefixes(node) if sizes[p] <= LARGEST_WINDOW < len(nodes))
        own = next(fitting, "")
        own = own if sizes[own] >= SMALLEST_MODULE else ""
        if number < 0 or own != home or size >= LARGEST_WINDOW:
            number, size, home = number + 1, 0, own
        window_of[node] = (number,)
        size += 1
    return window_of, number + 1


def _prefixes(node: fx.Node) -> list[str]:
    """The modules around a node, outermost first: a.b.c -> a, a.b, a.b.c."""
    path = module_path(node)
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _key(window: StageSpec) -> object:
    """Equal for windows that are lowered to the same programs, but for names."""
    number: dict[fx.Node, int] = {}
    regions: dict[Region, Any] = {}
    rows = []
    for node in window.graph.nodes:
        number[node] = len(number)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        specs = [
            (tuple(v.shape), v.dtype, v.requires_grad)
            for v in values
            if isinstance(v, torch.Tensor)
        ]
        target = node.target if node.op == "call_function" else node.op
        region = region_of(node)
        where = "" if region is None else regions.setdefault(region, (len(regions), region.policy))
        rows.append(f"{target} {arguments} {specs} {where}")
    return (
        tuple(rows),
        tuple(map(len, (window.parameters, window.buffers, window.constants))),
        tuple(map(len, (window.results, window.new_buffers))),
        tuple(window.parameters.index(name) for name in window.trained),
        tuple(port.has_grad for port in window.inputs),
        tuple(len(port.grad_sources) for port in window.outputs),
        window.num_objectives,
    )


# --- saved tensors of a lowered window -----------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """A saved tensor of windows with the same key.

    Attributes:
        num_bytes: its size.
        readers: positions in the window's graph of the nodes whose derivatives read it.
        input: which input of the window it is, if it is one.
        output: which output, if it is one.
        number: else a number of its own.
    """

    num_bytes: int
    readers: tuple[int, ...]
    input: int | None
    output: int | None
    number: int

    def name_in(self, window: StageSpec) -> str:
        """The same in two windows that save the same tensor."""
        if self.input is not None:
            return window.inputs[self.input].name
        if self.output is not None:
            return window.outputs[self.output].name
        return f"{window.index}#{self.number}"


def _saved_by(lowered: LoweredStage) -> Iterator[_Saved]:
    spec, first_input = lowered.spec, lowered.spec.first_input
    values = outputs_of(lowered.forward.graph)
    outputs = {_unviewed(value): i for i, value in enumerate(values[: len(spec.outputs)])}
    saved_values = values[len(values) - lowered.num_saved :]
    readers = _readers(lowered)
    for number, saved in enumerate(dict.fromkeys(lowered.saved)):
        if saved.output is not None:
            value = saved_values[saved.output]
            size = lowered.saved_specs[saved.output].num_bytes
            yield _Saved(size, readers[saved], None, outputs.get(_unviewed(value)), number)
        elif saved.argument is not None and saved.argument >= first_input:
            size = lowered.forward_inputs[saved.argument].num_bytes
            yield _Saved(size, readers[saved], saved.argument - first_input, None, number)


def _readers(lowered: LoweredStage) -> Mapping[object, tuple[int, ...]]:
    """Saved value -> positions in the stage's graph of the nodes whose derivatives read it.

    A node of the backward is a forward node that is computed again, which says from which node it
    was traced, or part of a derivative, which has the number that autograd gave to that node. What
    is computed again is followed to the derivatives that it is for.
    """
    assert lowered.backward is not None, "what is saved is for a backward"
    backward = lowered.backward.derivative
    position = {node.name: place for place, node in enumerate(lowered.spec.graph.nodes)}
    by_sequence: dict[int, int] = {}
    again: set[fx.Node] = set()
    for graph in (lowered.forward.graph, backward.graph):
        for node in graph.nodes:
            sources = node.meta.get("from_node")
            if sources and sources[0].name in position:
                again.add(node)
                number = node.meta.get("seq_nr", -1)
                by_sequence.setdefault(number, position[sources[0].name])
    # What no operation of the stage claims (an own autograd function may) is laid to the last one.
    last = len(position) - 1
    found: dict[object, set[int]] = defaultdict(set)
    holders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for saved, holder in zip(lowered.saved, holders, strict=False):
        for user in _derivatives_of(holder, again):
            found[saved].add(by_sequence.get(user.meta.get("seq_nr", -1), last))
    return {saved: tuple(sorted(places)) for saved, places in found.items()}


def _derivatives_of(holder: fx.Node, again: set[fx.Node]) -> list[fx.Node]:
    """What computes derivatives with a value, or with what is computed again from it."""
    found: dict[fx.Node, None] = {}
    followed = [holder]
    seen = {holder}
    for value in followed:
        for user in value.users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            if user in again or is_view(user):
                followed.append(user)
            else:
                found[user] = None
    return list(found)


def _unviewed(node: fx.Node) -> fx.Node:
    """The tensor of which a value is a rearrangement; a part of a tensor is another tensor."""
    while is_view(node) and input_of(node).meta["val"].numel() == node.meta["val"].numel():
        node = input_of(node)
    return node
