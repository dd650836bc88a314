"""Ranks of a tensor-parallel group as threads, without a device: programs run as PyTorch does.

What is compiled for a device elsewhere is cut into pieces here: compute pieces run node by node,
collective pieces over the transport of threads.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mpxla.comm.transport import Members
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.collectives import TENSOR_GROUP, is_collective
from mpxla.graph.split import split_stages
from mpxla.graph.stepgraph import StepGraph, is_random
from mpxla.graph.tensor.sequence import divide_sequences
from mpxla.graph.tensor.split_dims import check_split_dims
from mpxla.graph.tensor.varying import mark_varying
from mpxla.graph.tensor.vocabulary import divide_losses
from mpxla.nn.distribute import distribute, exchange_registered, set_tensor_parallelism
from mpxla.nn.shards import Shard
from mpxla.runtime.state import ModelState
from mpxla.stage.lower import LoweredStage, TracedStage
from mpxla.stage.pieces import CollectivePiece, ComputePiece, PieceList, annotate, split_graph
from mpxla.stage.piecewise import in_pieces
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.device.null import plain_lowering

__all__ = ["Rank", "cut_in_pieces", "distributed", "execute", "in_threads", "lower", "train_once"]

CPU = torch.device("cpu")
aten = torch.ops.aten
_one_at_a_time = threading.Lock()
"""Threads share the generator."""


@dataclass
class Rank:
    """One thread's part of a model."""

    model: nn.Module
    group: Members
    shards: dict[str, Shard]


def in_threads(function: Callable[..., Any], *of_ranks: Sequence[Any]) -> list[Any]:
    """Calls a function for every rank at the same time."""
    with ThreadPoolExecutor(len(of_ranks[0])) as pool:
        return list(pool.map(function, *of_ranks, timeout=60))


def distributed(build: Callable[[], nn.Module], size: int, is_marked: bool = True) -> list[Rank]:
    """A model's parts on all ranks."""
    ranks = tuple(range(size))
    groups = [Members(ranks, transport) for transport in threads_world(size)]
    models = [build() for _ in ranks]
    if is_marked:
        for model in models:
            set_tensor_parallelism(model)
    models = [exchange_registered(model) for model in models]
    shards = in_threads(distribute, models, groups)
    return [Rank(*parts) for parts in zip(models, groups, shards, strict=True)]


def lower(
    rank: Rank,
    loss_of: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    divides_sequences: bool = False,
) -> tuple[StepGraph, LoweredStage]:
    """A step that differentiates a loss, as one stage."""

    def step(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = loss_of(rank.model, *leaves)
        current_recorder().backward(loss)
        return loss

    leaves = [TensorLeaf(tuple(value.shape), value.dtype) for value in inputs]
    names = ModelState(rank.model).canonical_names
    ranks, transport = rank.group
    place = ranks.index(transport.rank), len(ranks)
    captured = capture_step(ToCapture(step, rank.model, leaves, names))
    check_split_dims(captured, {n: (s.dim, s.blocks) for n, s in rank.shards.items()})
    captured = divide_losses(captured)
    captured = mark_varying(captured, rank.shards, *place)
    if divides_sequences:
        captured = divide_sequences(captured, *place)
    nodes = [n for n in captured.graph.nodes if n.op == "call_function"]
    (stage,) = split_stages(captured, {node: (0,) for node in nodes}, 1)
    return captured, TracedStage(stage, True, plain_lowering()).lowered()


def cut_in_pieces(module: fx.GraphModule, inputs: Sequence[Any]) -> PieceList:
    """A program of a stage in compute and collective pieces."""
    annotate(module, inputs)
    kind_of = lambda n: CollectivePiece if is_collective(n) else ComputePiece  # noqa: E731
    return split_graph(module, kind_of)


class _Eager:
    """A compute piece, run by PyTorch."""

    def __init__(self, module: torch.fx.GraphModule):
        self._module = module
        for node in module.graph.nodes:  # values here are laid out otherwise than when traced
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
        module.recompile()
        self.is_random = any(is_random(node) for node in module.graph.nodes)

    def __call__(self, arguments: Sequence[torch.Tensor], seed: Any = None) -> list[torch.Tensor]:
        with torch.no_grad(), _one_at_a_time, torch.random.fork_rng(devices=()):
            if seed is not None:
                torch.manual_seed(int(seed))
            return [value.contiguous() for value in self._module(*arguments)]


def execute(
    name: str, plan: PieceList, group: Members, arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a program, with one seed for all ranks; every rank does."""
    groups, view = {TENSOR_GROUP: group}, torch.Tensor.detach
    program = in_pieces(name, plan, lambda _, __, piece: _Eager(piece.module), groups, view, list)
    return program(arguments, torch.tensor(7))


def train_once(
    rank: Rank, programs: tuple[StepGraph, LoweredStage], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of one microbatch; every rank runs it."""
    captured, lowered = programs
    spec = lowered.spec
    state = ModelState(rank.model)
    tensors = {**state.parameters, **state.buffers, **captured.constants}
    held = (*spec.parameters, *spec.buffers, *spec.constants)
    arguments = [tensors[name].detach() for name in held]
    arguments += [inputs[port.leaf] for port in spec.inputs]
    plan = cut_in_pieces(lowered.forward, lowered.forward_inputs)
    results = execute("stage 0 forward", plan, rank.group, arguments)
    kept = results[len(results) - lowered.num_saved :]
    saved = [arguments[s.argument] if s.output is None else kept[s.output] for s in lowered.saved]
    zeros = [torch.zeros(s.shape) for s in lowered.backward_inputs[: lowered.num_accumulators]]
    backward = lowered.backward.flat(lowered.backward_inputs, CPU)
    plan = cut_in_pieces(backward, lowered.backward_inputs)
    gradients = execute("stage 0 backward", plan, rank.group, [*zeros, *saved, torch.ones(())])
    return results[0], dict(zip(spec.trained, gradients, strict=False))
