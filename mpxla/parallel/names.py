"""What is said of a name that a wrapper does not have."""

import difflib
from typing import Any

__all__ = ["no_such_attribute"]


def no_such_attribute(wrapper: Any, name: str, inner: Any) -> AttributeError:
    """The error for a name that neither a wrapper nor what it wraps has.

    Args:
        wrapper: `DistributedModel` or `DistributedOptimizer`.
        name: of the attribute.
        inner: what it wraps.
    """
    kind = type(wrapper).__name__
    known = [other for other in dir(type(wrapper)) if not other.startswith("_")]
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"see dir(smp.{kind}) for what there is."
    return AttributeError(
        f"mpxla's {kind} has no attribute {name!r}, nor has the {type(inner).__name__} that it "
        f"wraps; {advice}",
        name=name,
        obj=wrapper,
    )
