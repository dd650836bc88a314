"""The example scripts of SMP's users end at the losses of the plain single-process scripts."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from mpxla.tests.compat.launching import EXAMPLES, launch, refusal, run_plainly
from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

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


@pytest.mark.parametrize(("num_replicas", "num_stages"), [(1, 1), (2, 2)])
def test_sentence_classifier(num_replicas, num_stages):
    options = ["--max_steps", "16", "--num_layers", "1"]
    expected = run_plain("sentence_classifier", *options)
    arguments = [*options, "--partitions", str(num_stages)]
    losses = run_client("sentence_classifier", num_replicas, num_stages, arguments)
    assert losses == [approx(expected)] * len(losses)
    assert expected < 0.69, "it has learned something"


def test_gpt_trainer_goes_on_from_a_checkpoint(corpus, tmp_path):
    options = ["--training_dir", str(corpus), "--num_layers", "1"]
    expected = run_plain("gpt_trainer", *options)
    folder = tmp_path / "checkpoints"
    arguments = [*options, "--pipeline_parallel_degree", "2"]
    arguments += ["--checkpoint_dir", str(folder), "--checkpoint_freq", "1"]
    run_client("gpt_trainer", 1, 2, [*arguments, "--stop_after", "3"])
    kept = {"total_steps2_partial", "total_steps3_partial", "newest", "fullmodel.pt"}
    assert kept <= {path.name for path in folder.iterdir()}
    assert not (folder / "total_steps1_partial").exists()
    losses = run_client("gpt_trainer", 1, 2, [*arguments, "--load_partial", "1"])
    assert losses == [approx(expected)] * len(losses)
    assert {path.name for path in folder.glob("*_partial")} == {
        "total_steps5_partial",
        "total_steps6_partial",
    }


def test_image_classifier_goes_on_from_checkpoints(tmp_path: Path):
    options = ["--num-samples", "256"]
    expected = run_plain("image_classifier", *options, "--epochs", "2")
    arguments = [*options, "--partitions", "2", "--model-dir", str(tmp_path)]
    run_client("image_classifier", 1, 2, [*arguments, "--epochs", "1"])
    after_first = tmp_path.with_name(f"{tmp_path.name}_first")
    shutil.copytree(tmp_path, after_first)
    for kind in ("partial", "full"):
        shutil.rmtree(tmp_path)
        shutil.copytree(after_first, tmp_path)
        resumed = [*arguments, "--resume", kind, "--assert-loss", "3"]
        losses = run_client("image_classifier", 1, 2, resumed)
        assert losses == [approx(expected)] * len(losses), kind


def launch_in_vain(script, arguments):
    """Text of the script's own error; the pooled processes live on."""
    return refusal(lambda: launch(script, arguments), AssertionError)


def test_image_classifier_refuses_a_loss_that_is_too_high(tmp_path: Path):
    script = str(EXAMPLES / "image_classifier.py")
    arguments = ["--num-samples", "64", "--epochs", "1", "--assert-loss", "0.1"]
    arguments += ["--partitions", "2", "--model-dir", str(tmp_path)]
    for text in run_ranks(launch_in_vain, 2, script, arguments):
        assert re.match(r"the loss [\d.]+ did not get below 0.1", text)
