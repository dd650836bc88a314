"""The functional graph of a step as an earlier start has made it, by what was traced.

The user's code runs at every start, since nothing else says what it does now. What follows from the
trace alone, which takes longer than tracing, is made once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.graph.capture.functional_step import Constants, FunctionalStep, constants_of
from mpxla.graph.casts import active_autocast
from mpxla.graph.fakes import fake_tensor
from mpxla.graph.fingerprint import (
    UnknownValueError,
    described,
    fingerprint,
    layouts,
    torch_settings,
)
from mpxla.graph.portable import dumped, loaded
from mpxla.kept import Kept, key_of
from mpxla.log import get_logger

__all__ = ["recall_step"]


@dataclass(frozen=True)
class _Layout:
    """What a stand-in for a value says of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> "_Layout":
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            raise UnknownValueError(type(value).__name__)
        if value.device.type != "cpu" or value.is_conj() or value.is_neg():
            raise UnknownValueError(f"a value on {value.device}, or one that is read otherwise")
        return cls(tuple(value.shape), value.dtype, value.stride(), value.requires_grad)

    def stand_in(self, mode: FakeTensorMode) -> torch.Tensor:
        found = fake_tensor(mode, self.shape, self.stride, self.dtype)
        return found.requires_grad_(self.requires_grad)


def recall_step(
    kept: Kept,
    traced: ExportedProgram,
    facts: Any,
    mode: FakeTensorMode,
    make: Callable[[], tuple[FunctionalStep, Constants]],
) -> tuple[FunctionalStep, Constants]:
    """The functional step of a traced program, and its constants.

    Args:
        kept: by earlier starts.
        traced: as `torch.export.export` gives it.
        facts: what else decides.
        mode: of the stand-ins for values.
        make: makes both.
    """
    constants = constants_of(traced)

    def write(made: tuple[FunctionalStep, Constants]) -> bytes:
        step, others = made
        if _addresses(others) != _addresses(constants):
            raise UnknownValueError("constants that were not traced")
        for node in step.graph.nodes:
            _check(node)
        module = _make_graph_module({}, step.graph)
        names = [node.name for node in step.graph.nodes]
        return dumped((module, names, step.inputs, step.outputs), _Layout.of, ("custom",))

    def read(value: bytes) -> tuple[FunctionalStep, Constants]:
        module, names, inputs, outputs = loaded(value, lambda layout: layout.stand_in(mode))
        # Ranks name nodes to each other, and not all of them need have found it.
        if names != [node.name for node in module.graph.nodes]:
            raise UnknownValueError("nodes got other names")
        return FunctionalStep(module.graph, inputs, outputs), constants

    return kept.recall(_key(traced, facts) if kept else None, make, write, read)


def _key(traced: ExportedProgram, facts: Any) -> str | None:
    try:
        ambient = torch_settings(), described(active_autocast())
        return key_of("traced", *ambient, described(facts), *_texts(traced))
    except UnknownValueError as error:
        get_logger().debug("the graph of a step is not kept: %s", error)
        return None


def _texts(program: ExportedProgram) -> list[str]:
    """All that a program is made of, with the lines and modules that errors name."""
    module, signature = program.graph_module, program.graph_signature
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    numbers: dict[Any, int] = {}
    nodes = [
        (
            node.name,
            layouts(node.meta.get("val")),
            node.meta.get("stack_trace"),
            [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()],
            described(node.meta.get("custom"), numbers),
        )
        for part in parts
        for node in part.graph.nodes
    ]
    plain_data = (
        signature.input_specs,
        signature.output_specs,
        dict(program.constants),
        program.range_constraints,
    )
    return [fingerprint(module.graph, module), described(plain_data), repr(nodes)]


def _addresses(constants: Constants) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in constants.items()}


def _check(node: fx.Node) -> None:
    """Raises for what would not be the same when it is read."""
    values = pytree.tree_leaves(node.meta.get("val"))
    if node.op == "get_attr" or not all(
        isinstance(value, (torch.Tensor, int, float, type(None))) for value in values
    ):
        raise UnknownValueError(node.name)
