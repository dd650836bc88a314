"""Every client behaviour by an unedited SMP script, run as the launcher runs it, on pooled ranks.

The scripts assert by themselves. The numbers are those of the list of client behaviours.
"""

import json
from pathlib import Path

import pytest

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True}


def launch(script, arguments, config):
    """Runs a script as the launcher does; SageMaker hands the configuration over like this."""
    import os

    from mpxla.compat.launcher import run_script

    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(config)
    run_script(Path(script), arguments)


def run_client(name, config, *arguments):
    run_ranks(launch, 2, str(SCRIPTS / f"{name}.py"), list(arguments), config)


def test_01_02_09_inputs():
    run_client("inputs", PIPELINE)


@pytest.mark.parametrize(
    ("built", "scheduler"),
    [
        ("before", "inner"),
        ("before", "linear"),
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


@pytest.mark.parametrize("config", [PIPELINE, REPLICAS], ids=["pipeline", "replicas"])
def test_22_accumulation(config):
    run_client("accumulation", config)


def test_autocast_in_steps():
    run_client("mixed_precision", PIPELINE)
