"""The vocabulary of configuration: what values a key may hold, other spellings, ignored keys.

Facts that several modules need stand here once, as tables. This module must not know how values
are gathered (`config`) nor how they constrain each other (`config_rules`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from numbers import Integral, Real
from typing import Any

__all__ = [
    "ALIASES",
    "IGNORED_KEYS",
    "PIPELINES",
    "PLACEMENT_ORDERS",
    "Kind",
    "boolean",
    "integer",
    "integer_or_word",
    "key",
    "number",
    "switch_or_word",
    "text",
    "word",
]

ALIASES = {"partitions": "pipeline_parallel_degree"}
"""Other spelling -> key."""

PIPELINES = ("interleaved", "eager_1f1b", "simple", "zero_bubble", "zero_bubble_v", "custom")
"""Schedules by name; `custom` is the user's own."""

PLACEMENT_ORDERS = {"cluster": "DPT", "spread": "TPD"} | {
    order: order for order in map("".join, permutations("DPT"))
}
"""Placement strategy -> order of the axes D, P, T, of which the right-most varies fastest."""

_UNDOCUMENTED = "SMP never documented it, and mpxla has nothing that it could switch"
IGNORED_KEYS = {
    "ddp_port": "process groups use the launcher's MASTER_PORT",
    "ddp_dist_backend": "the `transport` key and the device decide how processes communicate",
    "deterministic_server": "every rank follows a fixed schedule, so the order never varies",
    "horovod": "it is for TensorFlow only",
    "contiguous": "it is for TensorFlow only",
    "sdp_reduce_bucket_size": "gradients are scattered parameter by parameter, as soon as the "
    "backward of their block has ended",
    "skip_tracing": "the step is captured without running it or allocating memory, so there is no "
    "tracing step to skip",
    "static_mode": _UNDOCUMENTED,
    "fast_mode": _UNDOCUMENTED,
    "checkpoint_attentions": "choose modules with smp.set_activation_checkpointing instead",
    "overlapping_allreduce": "it is an argument of smp.DistributedModel; pass it there",
    "_match_weights": _UNDOCUMENTED,
    "_fp32_grad_accumulation": _UNDOCUMENTED,
    "_prescaled_batch": "the key is prescaled_batch",
}
"""Key without effect on XLA -> why."""


@dataclass(frozen=True)
class Kind:
    """The values that a key accepts."""

    expected: str
    """Completes "must be"."""
    convert: Callable[[Any], Any]
    """Returns the value as stored, or raises TypeError, ValueError or OverflowError."""
    is_nullable: bool = False
    """Whether None is accepted; it means "not given"."""


def key(default: Any, kind: Kind) -> Any:
    """Declares a dataclass field that holds a configuration key.

    Args:
        default: Value when nothing gives one; None for a key whose default depends on others.
        kind: The values it accepts.
    """
    return field(default=default, metadata={"kind": kind})


def boolean() -> Kind:
    """Returns the kind of True and False, also written 1 and 0."""

    def convert(value: Any) -> bool:
        if isinstance(value, Integral) and value in (0, 1):
            return bool(value)
        raise ValueError

    return Kind("True or False", convert)


def integer(
    minimum: int | None = None, *, is_nullable: bool = False, is_exponent_allowed: bool = False
) -> Kind:
    """Returns the kind of integers.

    Args:
        minimum: Smallest one, if there is a limit.
        is_nullable: Whether None is accepted.
        is_exponent_allowed: Whether floats without a fraction are accepted: people write 5e8.
    """

    def convert(value: Any) -> int:
        if is_exponent_allowed and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError
        if minimum is not None and value < minimum:
            raise ValueError
        return int(value)

    expected = "an integer" if minimum is None else f"an integer >= {minimum}"
    return Kind(expected, convert, is_nullable)


def number(
    *,
    above: float | None = None,
    within: tuple[float, float] | None = None,
    is_nullable: bool = False,
) -> Kind:
    """Returns the kind of finite numbers.

    Args:
        above: Limit that the number must exceed, if any.
        within: Smallest and largest number, if limited.
        is_nullable: Whether None is accepted.
    """

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        result = float(value)
        if not math.isfinite(result) or (above is not None and result <= above):
            raise ValueError
        if within is not None and not within[0] <= result <= within[1]:
            raise ValueError
        return result

    expected = "a number"
    if above is not None:
        expected += f" > {above:g}"
    if within is not None:
        expected += f" from {within[0]:g} to {within[1]:g}"
    return Kind(expected, convert, is_nullable)


def word(*choices: str) -> Kind:
    """Returns the kind of some fixed words.

    Args:
        *choices: The words.
    """

    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return Kind(f"one of {', '.join(repr(choice) for choice in choices)}", convert)


def integer_or_word(minimum: int, *choices: str) -> Kind:
    """Returns the kind of integers and some fixed words.

    Args:
        minimum: Smallest integer.
        *choices: The words.
    """
    count, words = integer(minimum, is_exponent_allowed=True), word(*choices)

    def convert(value: Any) -> int | str:
        return words.convert(value) if isinstance(value, str) else count.convert(value)

    return Kind(f"{count.expected} or {words.expected}", convert)


def switch_or_word(on: str, off: str, *others: str) -> Kind:
    """Returns the kind of some words, of which two are also written True and False.

    Args:
        on: The word for True.
        off: The word for False.
        *others: Further words.
    """
    choices = (on, off, *others)

    def convert(value: Any) -> str:
        if isinstance(value, bool):
            return on if value else off
        if value not in choices:
            raise ValueError
        return str(value)

    return Kind(f"True, False or one of {', '.join(map(repr, choices))}", convert)


def text(*, is_nullable: bool = False) -> Kind:
    """Returns the kind of strings.

    Args:
        is_nullable: Whether None is accepted.
    """

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value

    return Kind("a string", convert, is_nullable)
