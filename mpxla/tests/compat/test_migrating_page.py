"""`docs/migrating.md` says what the tables of names say, and names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from mpxla.compat.names import (
    CUDA_AMP_NAMES,
    CUDA_NAMES,
    CUDA_NVTX_NAMES,
    METHODS,
    REFUSED,
    SMP_MODULES,
    Fate,
)

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs" / "migrating.md"


def rows(heading):
    """Cells of the table under a heading, without its own two lines."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def grouped(names):
    """One row for names of the same meaning."""
    by_meaning: dict[str, list[str]] = {}
    for name, text in names:
        by_meaning.setdefault(text, []).append(f"`{name}`")
    return [[", ".join(found), text] for text, found in by_meaning.items()]


def smp_rows():
    names = [
        (f"smp.{module}.{name}" if module else f"smp.{name}", entry)
        for module, entries in SMP_MODULES.items()
        for name, entry in entries.items()
    ]
    names += [(f".{name}", entry) for name, entry in METHODS.items()]
    return grouped((name, entry.text) for name, entry in names if entry.fate is Fate.REFUSED)


def cuda_rows():
    prefix = {Fate.IDLE: "no effect: ", Fate.REFUSED: "not supported: "}
    names = [
        *((name, entry) for name, entry in CUDA_NAMES.items()),
        *((f"amp.{name}", entry) for name, entry in CUDA_AMP_NAMES.items()),
        *((f"nvtx.{name}", entry) for name, entry in CUDA_NVTX_NAMES.items()),
    ]
    return grouped((name, prefix.get(entry.fate, "") + entry.text) for name, entry in names)


def test_names_of_smp():
    assert rows("Names of SMP that are not supported") == smp_rows()


def test_names_of_cuda():
    assert rows("Names of CUDA") == cuda_rows()
    section = " ".join(PAGE.read_text().split("\n## Names of CUDA\n")[1].split())
    assert REFUSED.removeprefix("it ") in section


def functions():
    """Names of all tests."""
    return {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_change_has_its_test():
    named, known = [test for *_, test in rows("What changes")], functions()
    assert len(named) >= 15
    for test in named:
        assert re.fullmatch(r"`test_\w+`", test), test
        assert test.strip("`") in known, test
