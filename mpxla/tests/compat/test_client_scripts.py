"""Every client behaviour by an unedited SMP script, run as the launcher runs it, on pooled ranks.

The scripts assert by themselves. The numbers are those of the list of client behaviours.
"""

from pathlib import Path

import pytest
import torch

from mpxla.tests.compat.launching import launch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True}


def run_client(name, config, *arguments):
    run_ranks(launch, 2, str(SCRIPTS / f"{name}.py"), list(arguments), config)


def test_01_02_09_inputs():
    run_client("inputs", PIPELINE)


@pytest.mark.parametrize(
    ("built", "scheduler"),
    [
        ("before", "inner"),
        pytest.param("before", "linear", marks=pytest.mark.slow),
        pytest.param("after", "step", marks=pytest.mark.slow),
    ],
)
def test_03_04_05_06_18_23_optimizers(built, scheduler):
    run_client("optimizers", PIPELINE, "--built", built, "--scheduler", scheduler)


def test_07_08_10_13_17_outputs():
    run_client("outputs", PIPELINE)


@pytest.mark.parametrize("config", [PIPELINE, REPLICAS], ids=["11", "12"])
def test_11_12_evaluation(config):
    run_client("evaluation", config)


def test_14_21_groups():
    run_client("groups", REPLICAS)


def test_15_16_hooks():
    run_client("hooks", PIPELINE | {"auto_partition": False, "default_partition": 0})


def test_19_20_checkpoints(tmp_path):
    for stage in ("write", "read"):
        run_client("checkpoints", PIPELINE, stage, str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    files = {"partial.pt_0", "partial.pt_1", "full.pt", "global.pt_0"}
    assert names == files | {"whole_0.pt", "whole_1.pt"}
    plain = torch.load(tmp_path / "whole_0.pt")
    assert set(plain) == {"first.weight", "first.bias", "second.weight", "second.bias"}


@pytest.mark.parametrize("config", [PIPELINE, REPLICAS], ids=["pipeline", "replicas"])
def test_22_accumulation(config):
    run_client("accumulation", config)


def test_autocast_in_steps():
    run_client("mixed_precision", PIPELINE)
