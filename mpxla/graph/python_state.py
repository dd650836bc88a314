"""What a step function leaves in plain attributes that it reads: flags, counters, caches.

A capture runs the function once, and a program does not run Python. So the function is captured
again with what the first capture has left, to see whether that matters:

    the same graph                a count for the log; it does not count on, of which a warning tells
    another one, once             a flag (`if not self.initialized:`): the first program serves one
                                  microbatch, those after it have the second
    another one again             a number that the function computes with: an error
    constants in other places     a cache of tables; it stays what it was, and is filled by programs

This module must not know how steps are run.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.alike import lines_of
from mpxla.graph.capture_attributes import AttributeLog, Read
from mpxla.graph.plain import Change
from mpxla.graph.stepgraph import InputKind, StepGraph

__all__ = ["Attempt", "OnceRead", "PythonState"]


@dataclass(frozen=True)
class Attempt:
    """One capture.

    Attributes:
        step: the graph.
        reads: what it depends on.
        log: what it did with attributes.
    """

    step: StepGraph
    reads: list[Read]
    log: AttributeLog


@dataclass(frozen=True, eq=False)
class OnceRead(Read):
    """An attribute that the function reads and changes, once: its program is not used again."""

    def change(self) -> Change | None:
        """Always one, also where somebody has set the attribute back."""
        return Change(self.name, self.value, self.now())


@dataclass
class PythonState:
    """Judges captures.

    Attributes:
        left: what the last capture leaves in attributes, to be set when it is taken: the table of
            an object, a name and a value.
    """

    left: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def judged(self, capture: Callable[[], Attempt]) -> tuple[StepGraph, list[Read]]:
        """The step and what it reads; attributes are then what they were before.

        Args:
            capture: captures the step with attributes as they are.

        Raises:
            CaptureError: the step computes with a number that it changes.
        """
        self.left = []
        first = capture()
        changed = first.log.changed()
        left = first.log.left()
        try:
            once = self._once(first, capture) if changed else []
        except _CacheError:
            return first.step, [*first.reads, *changed]
        finally:
            first.log.restore()
        if not once:
            first.log.warn([read.name for read in changed])
        self.left = left
        return first.step, [*first.reads, *once]

    def _once(self, first: Attempt, capture: Callable[[], Attempt]) -> list[Read]:
        """Reads of flags by which the step goes another way the next time."""
        changed = {read.name: read for read in first.log.changed()}
        try:
            second = capture()
        except Exception as error:  # it finds no tensors where it has put them
            raise _CacheError from error
        try:
            again = {read.name for read in second.log.changed()} & changed.keys()
            same = lines_of(first.step) == lines_of(second.step)
            if same and _outputs(first.step) == _outputs(second.step):
                return []
            if again:
                self._refuse_counter(second, capture, again)
        finally:
            second.log.restore()
        flags = [read for name, read in changed.items() if name not in again]
        if not flags or _outputs(first.step) == _outputs(second.step):
            return []
        if first.log.has_constants({read.name for read in flags}):
            raise _CacheError
        return [OnceRead(read.name, read.value, read.now) for read in flags]

    def _refuse_counter(
        self, second: Attempt, capture: Callable[[], Attempt], names: set[str]
    ) -> None:
        third = capture()
        third.log.restore()
        if lines_of(third.step) == lines_of(second.step):
            return
        name = min(names)
        raise CaptureError(
            f"The step function computes with {name}, and changes it{second.log.line(name)}. It is "
            f"captured once per program, so that the number would stay. Count in a buffer "
            f"(register_buffer with a tensor, then self.name += 1), by which it may compute and "
            f"branch; or change it outside of the step function, or pass it as an argument."
        )


class _CacheError(Exception):
    """Attributes hold tensors beside the flag, and captures leave none: it is to stay as it was."""


def _outputs(step: StepGraph) -> list[Any]:
    """What outputs are computed of, and by what; constants of one shape count as the same."""
    digests: dict[fx.Node, tuple[bool, str]] = {}
    roles = dict(zip(step.placeholders, step.inputs, strict=True))

    def digest(node: fx.Node) -> tuple[bool, str]:
        value = node.meta.get("val")
        form = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        role = roles.get(node)
        if role is not None:
            is_constant = role.kind is InputKind.CONSTANT
            return is_constant, form if is_constant else f"{role.kind} {role.name} {role.index}"
        inputs = [digests[other] for other in node.all_input_nodes]
        if node.op != "output" and all(is_constant for is_constant, _ in inputs):
            return True, form
        leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
        texts = [digests[v][1] if isinstance(v, fx.Node) else repr(v) for v in leaves]
        text = f"{node.target} {texts}"
        return False, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    for node in step.graph.nodes:
        digests[node] = digest(node)
    nodes: Sequence[fx.Node] = step.output_nodes
    return [(role, digests[node]) for node, role in zip(nodes, step.outputs, strict=True)]
