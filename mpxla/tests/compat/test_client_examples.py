"""The example scripts of SMP's users end at the losses of the plain single-process scripts."""

import importlib.util
from pathlib import Path

import pytest

from mpxla.testing import run_ranks
from mpxla.tests.compat.launching import EXAMPLES, launch, run_plainly

pytestmark = pytest.mark.ranks

GRIDS = [
    pytest.param(1, 1, id="1x1", marks=pytest.mark.slow),
    pytest.param(1, 2, id="1x2", marks=pytest.mark.slow),
    pytest.param(2, 2, id="2x2"),
]
RELATIVE_TOLERANCE = 2e-4
"""Of a final loss: training magnifies the rounding of sums over microbatches and replicas."""


def run_client(name, num_replicas, num_stages, arguments):
    script = str(EXAMPLES / f"{name}.py")
    return run_ranks(launch, num_replicas * num_stages, script, arguments, timeout_s=240)


def run_plain(name, *arguments):
    (loss,) = run_ranks(run_plainly, 1, str(EXAMPLES / f"{name}_plain.py"), list(arguments))
    return loss


def approx(loss):
    return pytest.approx(loss, rel=RELATIVE_TOLERANCE)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("text_data", EXAMPLES / "text_data.py")
    text_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text_data)
    folder = tmp_path_factory.mktemp("corpus")
    text_data.write_corpus(folder / "train.jsonl", 32, 16, 64, seed=1)
    text_data.write_corpus(folder / "valid.jsonl", 16, 16, 64, seed=2)
    return folder


@pytest.mark.parametrize(("num_replicas", "num_stages"), GRIDS)
def test_sentence_classifier(num_replicas, num_stages):
    options = ["--max_steps", "16", "--num_layers", "1"]
    expected = run_plain("sentence_classifier", *options)
    arguments = [*options, "--partitions", str(num_stages)]
    losses = run_client("sentence_classifier", num_replicas, num_stages, arguments)
    assert losses == [approx(expected)] * len(losses)
    assert expected < 0.69, "it has learned something"


@pytest.mark.parametrize(("num_replicas", "num_stages"), GRIDS)
def test_gpt_trainer(num_replicas, num_stages, corpus: Path):
    options = ["--training_dir", str(corpus), "--num_layers", "1"]
    expected = run_plain("gpt_trainer", *options)
    arguments = [*options, "--pipeline_parallel_degree", str(num_stages)]
    losses = run_client("gpt_trainer", num_replicas, num_stages, arguments)
    assert losses == [approx(expected)] * len(losses)
