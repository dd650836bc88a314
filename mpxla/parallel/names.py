"""What is said of a name that a wrapper does not have."""

import difflib
from typing import Any

__all__ = ["NoSuchAttributeError"]


class NoSuchAttributeError(AttributeError):
    """A name that neither a wrapper (of a model or optimizer) nor what it wraps has."""

    def __init__(self, wrapper: Any, name: str, inner: Any):
        super().__init__(name=name, obj=wrapper)
        self._kind = type(wrapper)
        self._inner = type(inner).__name__

    def __str__(self) -> str:
        # Not before somebody reads it: `hasattr` in every step would pay for the search.
        kind = self._kind.__name__
        known = [other for other in dir(self._kind) if not other.startswith("_")]
        near = difflib.get_close_matches(str(self.name), known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"see dir(smp.{kind}) for what there is."
        return (
            f"mpxla's {kind} has no attribute {self.name!r}, nor has the {self._inner} that it "
            f"wraps; {advice}"
        )
