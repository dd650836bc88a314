"""What an earlier start has found out about a step, so that this one need not: by the step's graph.

The tensors that derivatives read, the choice of open keys with the measured times that led to it,
and stages as they were lowered. A start that finds none of it works as one that keeps nothing.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options

from mpxla.device.backend import Backend
from mpxla.graph.fingerprint import UnknownValue, described, fingerprint
from mpxla.graph.partition import SavedTensor
from mpxla.graph.stepgraph import StepGraph, module_path
from mpxla.graph.varying import VARYING
from mpxla.kept import Kept, key_of
from mpxla.log import get_logger
from mpxla.runtime.activations import PlannedStage
from mpxla.runtime.saved import saved_tensors
from mpxla.stage.spec import StageSpec, TensorSpec

__all__ = ["KeptSteps"]

_METAS = ("val", "custom", VARYING)
"""Metadata that cuts and lowering go by, beside the modules of nodes."""

_Saved = Mapping[str, tuple[SavedTensor, ...]]
_Decision = tuple[str, dict[str, Any], dict[str, float]]


class KeptSteps:
    """Keeps what is found out about steps.

    Args:
        kept: where.
        backend: for which steps are lowered and measured.
    """

    def __init__(self, kept: Kept, backend: Backend):
        self._kept, self._backend = kept, backend

    def saved(self, step: StepGraph) -> _Saved:
        """What `saved_tensors` says."""
        key = self._key("saved", step)
        found = None if key is None else self._kept.get(key)
        if found is not None:
            rows = json.loads(found)
            return {name: tuple(SavedTensor(*row) for row in rows[name]) for name in rows}
        saved = saved_tensors(step, self._backend.lowering)
        if key is not None:
            self._kept.put(key, json.dumps(saved).encode())
        return saved

    def decision(
        self, step: StepGraph, facts: Any, decide: Callable[[], _Decision]
    ) -> _Decision:
        """A log line, chosen keys, measured seconds of operators: of an earlier start, or found now.

        That also lets starts of a job compute the same numbers, where a measurement would differ.

        Args:
            step: the step.
            facts: what else decides.
            decide: finds them.
        """
        key = self._key("decision", step, facts)
        found = None if key is None else self._kept.get(key)
        if found is not None:
            line, keys, measured_s = json.loads(found)
            return f"{line} (an earlier start has measured that)", keys, measured_s
        decision = decide()
        if key is not None:
            self._kept.put(key, json.dumps(decision).encode())
        return decision

    def planned(
        self,
        stages: Sequence[StageSpec],
        facts: Any,
        plan: Callable[[], dict[int, PlannedStage]],
    ) -> dict[int, PlannedStage]:
        """The stages of a rank as `plan_stages` lowers them.

        Args:
            stages: those of the rank.
            facts: what else decides.
            plan: lowers them.
        """
        key = self._key_of_stages(stages, facts)
        found = None if key is None else self._kept.get(key)
        if found is not None:
            return _restored(found, stages)
        planned = plan()
        value = None if key is None else _dumped(planned)
        if key is not None and value is not None:
            self._kept.put(key, value)
        return planned

    def _key_of_stages(self, stages: Sequence[StageSpec], facts: Any) -> str | None:
        if not self._kept:
            return None
        try:
            texts = [_text_of_stage(stage) for stage in stages]
            return key_of("stages", self._backend.name, *texts, described(facts))
        except UnknownValue:
            return None

    def _key(self, what: str, step: StepGraph, *others: Any) -> str | None:
        """None if nothing is kept, or if the step computes with something unknown."""
        if not self._kept:
            return None
        roles = step.inputs, step.outputs, step.is_training
        try:
            texts = _text_of_graph(step.graph), described((roles, others))
            return key_of(what, self._backend.name, *texts)
        except UnknownValue:
            return None


def _text_of_graph(graph: fx.Graph) -> str:
    nodes = [(node.name, module_path(node), _layout(node.meta.get("val"))) for node in graph.nodes]
    return f"{fingerprint(graph, metas=_METAS)} {nodes}"


def _layout(value: Any) -> list[Any]:
    """Of the tensors of a value: what lowering goes by, beside shapes and dtypes."""
    tensors = (v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))
    return [(t.stride(), str(t.device), t.requires_grad) for t in tensors]


def _text_of_stage(stage: StageSpec) -> str:
    """With the user's lines, which lowered graphs name in errors."""
    plain = [getattr(stage, field.name) for field in fields(stage) if field.name != "graph"]
    lines = [node.meta.get("stack_trace") for node in stage.graph.nodes]
    return f"{_text_of_graph(stage.graph)} {described(plain)} {lines}"


def _dumped(planned: Mapping[int, PlannedStage]) -> bytes | None:
    """Lowered stages without the stages that they were made from; None if they cannot be written."""
    bare = {i: replace(p, lowered=replace(p.lowered, spec=None)) for i, p in planned.items()}  # pyright: ignore[reportArgumentType]
    with _plain_metas(graph for stage in planned.values() for graph in _graphs_of(stage)):
        try:
            return GraphPickler.dumps(bare, Options(ops_filter=None))
        except Exception as error:  # a graph may hold anything
            get_logger().debug("lowered stages are not kept: %r", error)
            return None


def _restored(value: bytes, stages: Sequence[StageSpec]) -> dict[int, PlannedStage]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bare = cast(dict[int, PlannedStage], GraphPickler.loads(value, mode))
    for graph in (graph for planned in bare.values() for graph in _graphs_of(planned)):
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(TensorSpec, _without_storage, node.meta["val"])
    return {
        stage.index: replace(planned, lowered=replace(planned.lowered, spec=stage))
        for stage, planned in ((stage, bare[stage.index]) for stage in stages)
    }


def _without_storage(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _graphs_of(stage: PlannedStage) -> list[fx.Graph]:
    lowered, split = stage.lowered, stage.split
    modules = [lowered.forward, None if lowered.backward is None else lowered.backward.derivative]
    if split is not None:
        modules += [part and part.graph for part in (split.input_part, split.weight_part)]
    return [module.graph for module in modules if module is not None]


@contextlib.contextmanager
def _plain_metas(graphs: Iterable[fx.Graph]) -> Generator[None]:
    """Meanwhile nodes know no more than their values and where they come from."""
    nodes = [node for graph in graphs for node in graph.nodes]
    metas = [node.meta for node in nodes]
    try:
        for node, meta in zip(nodes, metas, strict=True):
            node.meta = {name: meta[name] for name in ("val", "stack_trace") if name in meta}
            if "val" in meta:  # stand-ins take longest to restore
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, TensorSpec.of, meta["val"])
            for name in ("nn_module_stack", "fwd_nn_module_stack"):
                if meta.get(name):  # with classes, which need not be there again
                    node.meta[name] = {k: (path, "") for k, (path, _) in meta[name].items()}
        yield
    finally:
        for node, meta in zip(nodes, metas, strict=True):
            node.meta = meta
