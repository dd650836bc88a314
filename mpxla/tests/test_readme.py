"""The README's Python blocks run, the first one as a reader would run it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mpxla.config_rules import MISSING_FEATURES
from mpxla.testing import run_ranks_unpooled

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_has_an_example_of_about_twenty_lines():
    lines = [line for line in PYTHON_BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 22


def test_readme_names_only_files_and_targets_that_exist():
    for path in re.findall(r"\b(?:examples|mpxla|benchmarks)/[\w/]+(?:\.\w+)?", README):
        assert (REPOSITORY / path).exists(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_lists_the_features_that_are_refused():
    (row,) = re.findall(
        r"^\| (.*) \| not yet: `smp.init` refuses the key \|$", README, re.MULTILINE
    )
    assert sorted(row.split(", ")) == sorted(MISSING_FEATURES.values())


@pytest.mark.ranks
def test_first_block_runs(tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(PYTHON_BLOCKS[0])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-4000:]


def run_file(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.ranks
@pytest.mark.parametrize("block", PYTHON_BLOCKS[1:], ids=range(1, len(PYTHON_BLOCKS)))
def test_further_block_runs(block: str, tmp_path: Path):
    """In a process that has imported torch already."""
    script = tmp_path / "block.py"
    script.write_text(block)
    (result,) = run_ranks_unpooled(run_file, 1, str(script))
    assert result.exit_code == 0, result.stderr[-4000:]
