"""`optimizer.state` for scripts, which ask with the parameters of the model.

The state of the inner optimizer is that of what this rank's groups hold: of parameters, or of the
update copies in their places.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from mpxla.errors import MpxlaError
from mpxla.parallel.updates.optimizer_state import OptimizerState

__all__ = ["ShownState", "StateElsewhereError"]

_ELSEWHERE = object()


class StateElsewhereError(MpxlaError, KeyError):
    """The state of a parameter was asked for on a rank that does not update it."""

    __str__ = Exception.__str__  # KeyError quotes its text


class _Elsewhere(dict[Any, Any]):
    """The state of what other ranks update: nothing can be read, and what is written is theirs."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def __missing__(self, key: Any) -> Any:
        raise StateElsewhereError(
            f"optimizer.state has no {key!r} of {self._name!r} on this rank: another one updates "
            f"that parameter. optimizer.state_dict() gathers the state of all ranks, which all of "
            f"them call; 'if parameter in optimizer.state' tells what this rank has."
        )


class ShownState(MutableMapping[Any, Any]):
    """A view of the inner optimizer's state, by its keys or by the model's parameters.

    Where ranks hold parts of parameters, the tensors are of these parts. Entries that are set have
    tensors of the whole.
    """

    def __init__(self, contents: OptimizerState):
        self._contents = contents

    @property
    def inner(self) -> Any:
        """The state of the inner optimizer itself."""
        return self._contents.optimizer.state

    def _held(self, key: Any) -> Any:
        """The key of the inner state, or `_ELSEWHERE`."""
        if not isinstance(key, torch.nn.Parameter):
            return key
        was_exchanged, copy = self._contents.pieces.heir(key)
        if was_exchanged:
            return _ELSEWHERE if copy is None else copy.parameter
        return _ELSEWHERE if self._contents.is_elsewhere(key) else key

    def __getitem__(self, key: Any) -> Any:
        held = self._held(key)
        return _Elsewhere(self._contents.name_of(key)) if held is _ELSEWHERE else self.inner[held]

    def __setitem__(self, key: Any, value: Any) -> None:
        held = self._held(key)
        if held is not _ELSEWHERE:
            self.inner[held] = value if held is key else self._contents.pieces.cut_for(key, value)

    def __delitem__(self, key: Any) -> None:
        held = self._held(key)
        if held is not _ELSEWHERE:
            del self.inner[held]

    def __contains__(self, key: object) -> bool:
        held = self._held(key)
        return held is not _ELSEWHERE and held in self.inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are those of the state itself."""
        return self.inner.__reduce_ex__(protocol)

    def get(self, key: Any, default: Any = None) -> Any:
        """As that of a dictionary: nothing is put in."""
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """As that of a dictionary; nothing happens where another rank has it."""
        held = self._held(key)
        if held is _ELSEWHERE:
            return default[0] if default else self[key]
        return self.inner.pop(held, *default)

    def clear(self) -> None:
        """Forgets all state of this rank."""
        self.inner.clear()
