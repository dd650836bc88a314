"""TOML files of devices and models: found by name or path, and checked against a dataclass."""

import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from mpxla.errors import ConfigError

__all__ = ["SOURCES", "read_file", "shipped"]

SOURCES = "sources"
"""Table of a file that says where its figures are from; not read by the planner."""

_Described = TypeVar("_Described")


def shipped(kind: str) -> list[str]:
    """Names of the files of a kind ("device" or "model") that come with mpxla."""
    return sorted(path.stem for path in _folder(kind).glob("*.toml"))


def read_file(kind: str, name: str, into: type[_Described]) -> _Described:
    """Reads a device or a model ("device" or "model"), by the name of a shipped file or a path.

    The fields of the dataclass are the keys of the file; numbers must be above zero.

    Raises:
        ConfigError: there is no such file, or its keys or values are wrong; the text lists all
            problems.
    """
    path = _folder(kind) / f"{name}.toml" if name in shipped(kind) else Path(name)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {kind} model {name!r}{_nearest(name, shipped(kind))}. Name one of "
            f"{', '.join(shipped(kind))}, or the path of a TOML file."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from error
    values.pop(SOURCES, None)
    problems = _problems(values, into)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the {kind} model {path} cannot be used:\n{lines}")
    return into(**values)


def _folder(kind: str) -> Path:
    return Path(__file__).parent / f"{kind}s"


def _problems(values: dict[str, Any], into: type) -> list[str]:
    """What is wrong with a file, in the order of its keys, then what is missing."""
    fields = {field.name: field for field in dataclasses.fields(into)}
    problems: list[str] = []
    for key, value in values.items():
        if key not in fields:
            near = _nearest(key, list(fields), cutoff=0.0)
            problems.append(f"{key} is not a key{near}")
        elif problem := _wrong_value(value, fields[key].type):
            problems.append(f"{key} = {value!r}: {problem}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    return problems + [f"{name} is missing" for name in missing]


def _wrong_value(value: Any, kind: Any) -> str | None:
    """Why a value cannot be that of a field of this type."""
    if kind is str or kind is bool:
        is_right = isinstance(value, kind)
        return None if is_right else f"write {'a text' if kind is str else 'true or false'}"
    if kind is int:
        is_right = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if is_right else "write a whole number above zero"
    if kind is float:
        return None if _is_positive(value) else "write a number above zero"
    is_right = isinstance(value, dict) and value and all(map(_is_positive, value.values()))
    return None if is_right else "write a table of numbers above zero"


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")


def _nearest(name: str, candidates: list[str], cutoff: float = 0.4) -> str:
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
