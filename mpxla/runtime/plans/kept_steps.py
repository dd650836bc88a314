"""What an earlier start has found out about a step, so that this one need not: by the step's graph.

The tensors that derivatives read, the choice of open keys with the measured times that led to it,
and stages as they were lowered. A start that finds none of it works as one that keeps nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from torch import fx

from mpxla.device.backend import Backend
from mpxla.graph.fingerprint import (
    UnknownValueError,
    described,
    fingerprint,
    layouts,
    torch_settings,
)
from mpxla.graph.partition.words import SavedTensor
from mpxla.graph.portable import dumped, loaded
from mpxla.graph.stepgraph import StepGraph, module_path
from mpxla.graph.tensor.varying import VARYING
from mpxla.kept import Kept, key_of
from mpxla.runtime.plans.activations import PlannedStage
from mpxla.runtime.saved import saved_tensors
from mpxla.stage.spec import StageSpec, TensorSpec

__all__ = ["KeptSteps"]

_METAS = ("val", "custom", VARYING)
"""Metadata that cuts and lowering go by, beside the modules of nodes."""

_Saved = Mapping[str, tuple[SavedTensor, ...]]
_Decision = tuple[str, dict[str, Any], dict[str, float]]


class KeptSteps:
    """Keeps what is found out about steps."""

    def __init__(self, kept: Kept, backend: Backend):
        self._kept, self._backend = kept, backend

    def saved(self, step: StepGraph) -> _Saved:
        """What `saved_tensors` says."""

        def read(found: bytes) -> _Saved:
            rows = json.loads(found)
            return {name: tuple(SavedTensor(*row) for row in rows[name]) for name in rows}

        def make() -> _Saved:
            return saved_tensors(step, self._backend.lowering)

        key = self._key("saved", lambda: _texts_of_step(step))
        return self._kept.recall(key, make, _as_json, read)

    def decision(self, step: StepGraph, facts: Any, decide: Callable[[], _Decision]) -> _Decision:
        """A log line, chosen keys, measured seconds of operators: an earlier start's, or new ones.

        That also lets starts of a job compute the same numbers, where a measurement would differ.
        `facts` are what else decides.
        """

        def read(found: bytes) -> _Decision:
            line, keys, measured_s = json.loads(found)
            return f"{line} (an earlier start has measured that)", keys, measured_s

        key = self._key("decision", lambda: _texts_of_step(step, facts))
        return self._kept.recall(key, decide, _as_json, read)

    def planned(
        self,
        stages: Sequence[StageSpec],
        facts: Any,
        plan: Callable[[], dict[int, PlannedStage]],
    ) -> dict[int, PlannedStage]:
        """The stages of a rank as `plan_stages` lowers them; `facts` are what else decides."""
        key = self._key("stages", lambda: [*map(_text_of_stage, stages), described(facts)])
        return self._kept.recall(key, plan, _dumped, lambda found: _restored(found, stages))

    def _key(self, what: str, texts: Callable[[], Sequence[str]]) -> str | None:
        """None if nothing is kept, or if the step computes with something unknown."""
        if not self._kept:
            return None
        try:
            return key_of(what, self._backend.name, torch_settings(), *texts())
        except UnknownValueError:
            return None


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _texts_of_step(step: StepGraph, *others: Any) -> tuple[str, str]:
    roles = step.inputs, step.outputs, step.is_training
    return _text_of_graph(step.graph), described((roles, others))


def _text_of_graph(graph: fx.Graph) -> str:
    nodes = [(node.name, module_path(node), layouts(node.meta.get("val"))) for node in graph.nodes]
    return f"{fingerprint(graph, metas=_METAS)} {nodes}"


def _text_of_stage(stage: StageSpec) -> str:
    """With the user's lines, which lowered graphs name in errors."""
    plain = [getattr(stage, field.name) for field in fields(stage) if field.name != "graph"]
    lines = [node.meta.get("stack_trace") for node in stage.graph.nodes]
    return f"{_text_of_graph(stage.graph)} {described(plain)} {lines}"


def _dumped(planned: Mapping[int, PlannedStage]) -> bytes:
    """Lowered stages without what they were made from."""
    nothing = cast(StageSpec, None)
    bare = {
        index: replace(one, lowered=replace(one.lowered, spec=nothing))
        for index, one in planned.items()
    }
    return dumped(bare, TensorSpec.of)


def _restored(value: bytes, stages: Sequence[StageSpec]) -> dict[int, PlannedStage]:
    bare = cast(dict[int, PlannedStage], loaded(value, TensorSpec.without_storage))
    return {
        stage.index: replace(one, lowered=replace(one.lowered, spec=stage))
        for stage in stages
        for one in [bare[stage.index]]
    }
