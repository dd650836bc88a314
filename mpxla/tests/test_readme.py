"""Python blocks of README and of guides run, the first one as a reader would run it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mpxla.tests.ranks.run import run_ranks_unpooled

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
README = (REPOSITORY / "README.md").read_text()
GUIDES = ("checkpoints", "debugging")
PATHS = re.compile(r"(?<![\w/])(?:examples|mpxla|benchmarks)/[\w/]+(?:\.\w+)?")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


(FIRST,) = python_blocks(README)
BLOCKS = {"README": FIRST} | {
    f"{name}-{number}": block
    for name in GUIDES
    for number, block in enumerate(python_blocks((DOCS / f"{name}.md").read_text()))
}


def test_readme_has_an_example_of_about_twenty_lines():
    lines = [line for line in FIRST.splitlines() if line.strip()]
    assert len(lines) <= 22


def test_readme_is_about_one_screen():
    assert len(README.splitlines()) <= 80


@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.stem
)
def test_pages_name_only_files_and_targets_that_exist(page: Path):
    text = page.read_text()
    for path in PATHS.findall(text):
        assert (REPOSITORY / path).exists(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.slow
@pytest.mark.ranks
def test_first_block_runs_by_itself(tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(FIRST)
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-4000:]


# In a process that has imported torch already.


def run_file(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.ranks
@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str, tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[name])
    (result,) = run_ranks_unpooled(run_file, 1, str(script))
    assert result.exit_code == 0, result.stderr[-4000:]
