"""Behaviours 19 and 20, and the example scripts that save and reload, through the launcher."""

from pathlib import Path

import pytest
import torch

from mpxla.tests.compat.launching import launch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}


def test_19_20_checkpoints(tmp_path):
    script = str(SCRIPTS / "checkpoints.py")
    for stage in ("write", "read"):
        run_ranks(launch, 2, script, [stage, str(tmp_path)], PIPELINE)
    names = {path.name for path in tmp_path.iterdir()}
    files = {"partial.pt_0", "partial.pt_1", "full.pt", "global.pt_0"}
    assert names == files | {"whole_0.pt", "whole_1.pt"}
    plain = torch.load(tmp_path / "whole_0.pt")
    assert set(plain) == {"first.weight", "first.bias", "second.weight", "second.bias"}
