"""Which Python floats of a call are inputs of its program, and what is said about the others.

The first value of a float is a constant, as Python takes it. When it changes, it becomes an input,
so that an annealed weight compiles once more and no further; one whose value Python needs stays a
constant. (The idea of automatic dynamic shapes in torch.compile.) The first rank of a pipeline
decides, and announces it with the signature.
This module must not know how a step is captured.
"""

from collections import Counter
from collections.abc import Iterable

from mpxla.log import get_logger, warn_once
from mpxla.runtime.signature import PlainValue, Signature, changed_values

__all__ = ["NumberPolicy"]


class NumberPolicy:
    """What is known about the arguments of step functions of one pipeline."""

    def __init__(self) -> None:
        self._inputs: dict[str, set[str]] = {}
        self._constants: dict[str, set[str]] = {}
        self._changes: Counter[tuple[str, str]] = Counter()

    def inputs(self, function: str) -> frozenset[str]:
        """Paths of the floats that are inputs."""
        return frozenset(self._inputs.get(function, ()))

    def learn(self, signature: Signature, known: Iterable[Signature]) -> bool:
        """Makes inputs of floats that have changed since an earlier call.

        Returns:
            Whether there were any: the call has to be described again.
        """
        changed = {
            path
            for old in known
            for path, a, b in changed_values(signature, old)
            if _is_float(a) and _is_float(b)
        } - self._constants.get(signature.function, set())
        self._inputs.setdefault(signature.function, set()).update(changed)
        return bool(changed)

    def keep_constant(self, function: str, paths: Iterable[str]) -> None:
        """Notes floats whose value Python needs."""
        for path in paths:
            self._inputs[function].discard(path)
            self._constants.setdefault(function, set()).add(path)
            get_logger().info(
                "argument %s of step function %s stays a constant of the program: its value is "
                "needed in Python (a branch, a function of math, a probability of dropout)",
                path,
                function.rpartition(".")[2],
            )

    def count(self, signature: Signature, known: Iterable[Signature]) -> None:
        """Counts what a new program is for, and warns when that happens again."""
        changes = [c for c in (changed_values(signature, old) for old in known) if c]
        if not changes:
            return
        name = signature.function.rpartition(".")[2]
        for path, _, new in min(changes, key=len):
            self._changes[signature.function, path] += 1
            if self._changes[signature.function, path] == 2:
                warn_once(
                    f"recompilation {signature.function} {path}",
                    f"step function {name} was compiled again because argument {path} changed, for "
                    f"the second time (now {new}). Every new value compiles again. Pass a number "
                    f"that changes as a tensor (in non_split_inputs), and objects that compare as "
                    f"equal (`__eq__`) or the same object in every call.",
                )

    def count_outside(self, function: str, change: str) -> None:
        """Counts values outside of the arguments that changed, and warns when one does so again."""
        what, is_value, _ = change.partition(" changed from ")
        if not is_value:
            return
        self._changes[function, what] += 1
        if self._changes[function, what] == 2:
            warn_once(
                f"recompilation {function} {what}",
                f"step function {function.rpartition('.')[2]} was compiled again because {change}, "
                f"for the second time. Every new value compiles again. Pass a number that changes "
                f"to the step function as an argument.",
            )


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, PlainValue) and isinstance(leaf.value, float)
