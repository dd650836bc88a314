"""Functions that remember their results (`functools.lru_cache`), where these are tensors.

    @lru_cache
    def mask(size): return torch.ones(size, size).tril()

A capture leaves tensors without numbers there, which the next one would find. So such a function is
called outside of captures, with the same arguments, as PyTorch calls it once; its results are then
tensors that steps find outside.
"""

import contextlib
import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpxla.graph.containers import has_fakes
from mpxla.user_lines import is_model_code

__all__ = ["fill_memos", "stale_memos"]

_Memo: Any = functools._lru_cache_wrapper  # pyright: ignore[reportPrivateUsage]
_MOST_TIMES = 3
"""One that gets other arguments in every capture would be filled without an end."""
_known: weakref.WeakSet[Any] = weakref.WeakSet()
_num_modules = 0


def stale_memos(filled: Counter[int], look: bool) -> list[Any]:
    """Functions that remember tensors of a capture, and can be called again.

    Args:
        filled: how often this was said of each for this call of a step, by id.
        look: whether to look for those that were made after the last module was imported.
    """
    global _num_modules
    if look or _num_modules != len(sys.modules):  # among half a million objects, in 0.1 s
        _known.update(value for value in _all_objects() if type(value) is _Memo)
        _num_modules = len(sys.modules)
    memos = [memo for memo in _known if memo.cache_info().currsize and _is_of_models(memo)]
    stale = [memo for memo in memos if has_fakes(gc.get_referents(memo))]
    stale = [m for m in stale if filled[id(m)] < _MOST_TIMES and not has_fakes(_keys(m))]
    filled.update(map(id, stale))
    return stale


def fill_memos(memos: Iterable[Any]) -> None:
    """Calls them with all the arguments that they have had."""
    for memo in memos:
        typed = memo.cache_parameters()["typed"]
        calls = [_arguments(key, typed) for key in _keys(memo)]
        memo.cache_clear()
        for args, kwargs in calls:
            with contextlib.suppress(Exception):  # which the step meets itself
                memo(*args, **kwargs)


def _all_objects() -> list[Any]:
    """Those that a script has frozen (`gc.freeze()`) too, which only thawing them shows."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.collect()  # else garbage would be frozen too, and stay
        gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return found


def _is_of_models(memo: Any) -> bool:
    code = getattr(getattr(memo, "__wrapped__", None), "__code__", None)
    return code is not None and is_model_code(code.co_filename)


def _keys(memo: Any) -> list[Any]:
    tables = [part for part in gc.get_referents(memo) if type(part) is dict]
    return [key for table in tables if table is not vars(memo) for key in table]


def _arguments(key: Any, typed: bool) -> tuple[list[Any], dict[str, Any]]:
    """Those by which Python has made a key.

    A lone number or text is the key itself. Others are in a tuple: positional ones, a bare object
    before names and values, and the types of all if they count.
    """
    if not isinstance(key, tuple):
        return [key], {}
    parts: list[Any] = list(key)
    mark = next((place for place, part in enumerate(parts) if type(part) is object), None)
    if mark is None:
        return parts[: len(parts) // (2 if typed else 1)], {}
    count = len(parts) - mark - 1
    if typed:  # mark names values of `count` parts, and one type for each value
        count = 2 * ((count - mark) // 3)
    named = parts[mark + 1 : mark + 1 + count]
    return parts[:mark], dict(zip(named[::2], named[1::2], strict=True))
