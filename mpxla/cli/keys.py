"""`python -m mpxla keys`: every configuration key with its default and values, as Markdown.

`docs/configuration.md` holds what it prints; a test compares them.
"""

import argparse
import ast
import inspect
import itertools
import re
from dataclasses import fields
from typing import Any

from mpxla.config import Config
from mpxla.config_keys import ALIASES, IGNORED_KEYS

__all__ = ["add_parser", "table_of_keys"]


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("keys", help="print all configuration keys as a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table."""
    print("\n".join(table_of_keys()))


def table_of_keys() -> list[str]:
    """Lines of a table in Markdown: key, default, values, meaning."""
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    spellings = {name: spelling for spelling, name in ALIASES.items()}
    meanings = _docstrings()
    for found in fields(Config):
        kind = found.metadata.get("kind")
        if kind is None:
            continue
        name, meaning = found.name, meanings[found.name]
        if name in IGNORED_KEYS:
            meaning += f" ({IGNORED_KEYS[name]})"
        key = f"`{name}`" + (f", `{spellings[name]}`" if name in spellings else "")
        default = f"`{found.default!r}`"
        cells = (key, default, kind.expected, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _docstrings() -> dict[str, str]:
    """The string below each field of the configuration, in one line."""
    (kind,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(kind, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(kind.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = getattr(getattr(after, "value", None), "value", "")
            found[statement.target.id] = re.sub(r"\s+", " ", str(text))
    return found
