"""The examples: their data reader and log in this process, their scripts as a user starts them."""

import difflib
import functools
import gzip
import importlib.util
import os
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mpxla.tests.ranks.run import run_ranks_unpooled

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "mnist_mlp"
SCRIPTS = ("train_cpu.py", "train.py", "train_smp.py", "train_torchrun.py")

EPOCHS = "--epochs=10"
"""Half of what the scripts do by default."""
EPOCH_LOSS_TOLERANCE = 1e-3
"""Absolute, on losses printed with four digits; rounding grows by training, so for early epochs."""


def load_module(name: str) -> ModuleType:
    """Imports a file of the example under its own name, without touching ``sys.path``."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits_data = load_module("digits_data")
training_log = load_module("training_log")


def idx_bytes(values: np.ndarray, dtype: int = 0x08) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, dtype, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, num_samples: int, suffix: str = "") -> None:
    """Writes four IDX files of images whose every pixel is ten times their label."""
    for split in ("train", "t10k"):
        labels = np.arange(num_samples) % 10
        images = np.broadcast_to(10 * labels[:, None, None], (num_samples, 4, 3))
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(values)
            path = folder / f"{split}-{name}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)


def run(*command: str, timeout_s: float = 240) -> str:
    """Runs a command as a user would and returns its output; ends all that it started."""
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks on this signal, and only on this
        output, errors = process.communicate()
        pytest.fail(f"{command} took more than {timeout_s} s\n{output}\n{errors[-4000:]}")
    assert process.returncode == 0, f"{command}\n{output}\n{errors[-4000:]}"
    return output


def run_file(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_forked(num_ranks: int, script: str, *arguments: str) -> str:
    """Runs a script in processes that have imported torch already; returns rank 0's output."""
    results = run_ranks_unpooled(run_file, num_ranks, str(EXAMPLE / script), *arguments)
    assert [result.exit_code for result in results] == [0] * num_ranks, results[0].stderr[-4000:]
    return results[0].stdout


def epoch_losses(output: str) -> list[tuple[float, float]]:
    """Returns (train loss, test loss) of every epoch that a script printed."""
    found = re.findall(r"^epoch .*train loss ([\d.]+), test loss ([\d.]+)", output, re.MULTILINE)
    return [(float(train), float(test)) for train, test in found]


def final_accuracy(output: str) -> float:
    found = re.findall(r"^final train loss [\d.]+, test accuracy ([\d.]+) %", output, re.MULTILINE)
    assert len(found) == 1, output
    return float(found[0])


# The data reader.


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_file_is_read_back(tmp_path: Path, suffix: str):
    values = np.arange(24).reshape(2, 3, 4)
    path = tmp_path / f"values{suffix}"
    content = idx_bytes(values)
    path.write_bytes(gzip.compress(content) if suffix else content)
    np.testing.assert_array_equal(digits_data.read_idx(path), values)


GOOD = idx_bytes(np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"", r"a: not an IDX file, it starts with $"),
        ("a", b"\x01\x02\x03\x04", r"not an IDX file, it starts with 01 02 03 04"),
        ("a", gzip.compress(GOOD, mtime=0), r"starts with 1f 8b .*rename it to end in \.gz"),
        ("a.gz", GOOD, r"a\.gz: not a complete gzip file"),
        ("a.gz", gzip.compress(GOOD, mtime=0)[:-9], r"a\.gz: not a complete gzip file"),
        ("a", idx_bytes(np.zeros((2, 3)), dtype=0x0D), r"IDX type 0x0d, expected 0x08"),
        ("a", GOOD[:9], r"ends inside its header of 12 bytes"),
        ("a", GOOD[:-1], r"announces \(2, 3\) = 6 values, the file holds 5"),
        ("a", GOOD + b"\0", r"announces \(2, 3\) = 6 values, the file holds 7"),
    ],
)
def test_damaged_idx_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        digits_data.read_idx(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_folder_is_read(tmp_path: Path, suffix: str):
    write_mnist(tmp_path, num_samples=20, suffix=suffix)
    digits = digits_data.load_digits(tmp_path)
    for images, labels in (digits[:2], digits[2:]):
        assert labels.tolist() == [i % 10 for i in range(20)]
        expected = (10 * labels / 255).unsqueeze(1).expand(20, 12)
        torch.testing.assert_close(images, expected)


def test_mnist_files_with_a_dot_in_the_name_are_found(tmp_path: Path):
    path = tmp_path / "train-images.idx3-ubyte"
    path.touch()
    assert digits_data.find_idx(tmp_path, "train-images-idx3-ubyte") == path


def test_missing_mnist_file_is_named(tmp_path: Path):
    write_mnist(tmp_path, num_samples=20)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds none of t10k-labels-idx1-ubyte, .*\.gz"):
        digits_data.load_digits(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(19), r"shape \(20, 4, 3\) .* do not belong to labels of shape \(19,\)"),
        (np.zeros((20, 1)), r"do not belong to labels of shape \(20, 1\)"),
        (np.full(20, 10), r"train-labels-idx1-ubyte: label 10 is not a digit"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, labels: np.ndarray, message: str):
    write_mnist(tmp_path, num_samples=20)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    with pytest.raises(ValueError, match=message):
        digits_data.load_digits(tmp_path)


def test_bundled_digits_are_split_without_overlap():
    digits = digits_data.load_digits()
    assert digits.train_images.shape == (1477, 64)
    assert digits.test_images.shape == (320, 64)
    assert 0 == digits.train_images.min() and digits.train_images.max() == 1
    assert sorted(digits.test_labels.unique().tolist()) == list(range(10))
    every_image = torch.cat([digits.train_images, digits.test_images])
    assert len(every_image.unique(dim=0)) == 1797


def test_bundled_digits_keep_their_labels():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    label_of = {tuple(image / 16): label for image, label in zip(images, labels, strict=True)}
    digits = digits_data.load_digits()
    expected = [label_of[tuple(image.tolist())] for image in digits.test_images]
    assert digits.test_labels.tolist() == expected


def test_order_of_training_batches_follows_from_the_seed_alone():
    def first_labels(seed: int, global_seed: int) -> list[int]:
        torch.manual_seed(global_seed)
        train_loader, _ = digits_data.make_loaders(digits_data.load_digits(), 64, seed)
        return next(iter(train_loader))[1].tolist()

    assert first_labels(seed=0, global_seed=0) == first_labels(seed=0, global_seed=1)
    assert first_labels(seed=0, global_seed=0) != first_labels(seed=1, global_seed=0)


def test_incomplete_batches_are_dropped():
    loaders = digits_data.make_loaders(digits_data.load_digits(), 100, 0)
    assert [len(loader) for loader in loaders] == [14, 3]
    assert {len(labels) for loader in loaders for _, labels in loader} == {100}


@pytest.mark.parametrize("batch_size", [0, 321])
def test_batch_size_without_a_batch_is_refused(batch_size: int):
    with pytest.raises(ValueError, match=rf"batch size {batch_size}, but there are \d+ \w+ sam"):
        digits_data.make_loaders(digits_data.load_digits(), batch_size, 0)


# The log.


def make_log(num_epochs: int, is_silent: bool = False):
    train_loader, test_loader = digits_data.make_loaders(digits_data.load_digits(), 100, 0)
    return training_log.TrainingLog(num_epochs, train_loader, test_loader, is_silent)


def test_log_reports_epochs_and_the_throughput_of_the_median_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now_s = 0.0
    monkeypatch.setattr(training_log.time, "perf_counter", lambda: now_s)
    log = make_log(num_epochs=3)
    for epoch_s in (28.0, 7.0, 2.0):
        assert len(list(log.batches())) == 14
        now_s += epoch_s
        log.end_training(train_loss=1 / epoch_s)
        now_s += 1000  # evaluation is not timed
        log.end_evaluation(test_loss=0.25, accuracy=1 - epoch_s / 100)
    log.write("a table")
    monkeypatch.undo()
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/3: train loss 0.0357, test loss 0.2500, test accuracy 72.00 %",
        "epoch 2/3: train loss 0.1429, test loss 0.2500, test accuracy 93.00 %",
        "epoch 3/3: train loss 0.5000, test loss 0.2500, test accuracy 98.00 %",
        "a table",
        "throughput 2.0 iterations/s, 200 samples/s in the median epoch of training; "
        "the first took 28.00 s",
        "final train loss 0.5000, test accuracy 98.00 % of 300 samples",
    ]


def test_log_goes_on_where_an_earlier_run_ended(capsys: pytest.CaptureFixture[str]):
    log = make_log(num_epochs=3)
    log.skip(1, 12)
    assert [len(list(log.batches())) for _ in range(2)] == [2, 14]
    log.end_training(0.5)
    log.end_evaluation(0.25, 0.5)
    assert capsys.readouterr().out.startswith("epoch 2/3: train loss 0.5000")
    finished = make_log(num_epochs=1)
    finished.skip(1, 0)
    finished.close()
    assert capsys.readouterr().out == ""


def test_silent_log_prints_nothing(capfd: pytest.CaptureFixture[str]):
    log = make_log(num_epochs=1, is_silent=True)
    assert len(list(log.batches())) == 14
    log.end_training(1.0)
    log.end_evaluation(1.0, 0.5)
    log.write("a table")
    log.close()
    assert capfd.readouterr() == ("", "")


def test_no_epochs_are_refused():
    with pytest.raises(ValueError, match="0 epochs asked for; at least one is needed"):
        make_log(num_epochs=0)


@functools.cache
def plain_output() -> str:
    """What the script in plain PyTorch prints."""
    return run_forked(1, "train_cpu.py", EPOCHS)


def plain_losses(num_epochs: int) -> list[tuple[float, float]]:
    """Of its first epochs."""
    return epoch_losses(plain_output())[:num_epochs]


# The scripts.


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstring_starts_with_the_command(script: str):
    first_line = (EXAMPLE / script).read_text().splitlines()[0]
    assert re.match(
        rf'"""(python|torchrun --nproc_per_node 2) examples/mnist_mlp/{script}\b', first_line
    )


def test_first_steps_show_the_difference_between_the_plain_and_the_smp_script():
    plain, smp = ((EXAMPLE / name).read_text().splitlines() for name in (SCRIPTS[0], SCRIPTS[2]))
    diff = difflib.unified_diff(plain, smp, SCRIPTS[0], SCRIPTS[2], n=1, lineterm="")
    page = (REPOSITORY / "docs" / "first-steps.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    assert shown == ["\n".join(diff) + "\n"]


def check_learned(output: str) -> None:
    assert len(epoch_losses(output)) == 10
    assert final_accuracy(output) >= 90


@pytest.mark.slow
@pytest.mark.ranks
def test_plain_scripts_learn_the_digits():
    check_learned(plain_output())
    output = run(str(EXAMPLE / "train.py"), EPOCHS)
    check_learned(output)
    actual, expected = epoch_losses(output)[:3], plain_losses(3)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=EPOCH_LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.ranks
def test_plain_script_reads_mnist_files(tmp_path: Path):
    write_mnist(tmp_path, num_samples=200, suffix=".gz")
    output = run_forked(1, "train_cpu.py", "--epochs", "1", "--data-dir", str(tmp_path))
    assert re.search(r"^final .* of 192 samples$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.ranks
def test_smp_script_learns_the_digits():
    """Under torchrun it is run in `checkpoint/test_restart.py`."""
    output = run_forked(2, "train_smp.py", EPOCHS)
    check_learned(output)
    check_run(output, plain_losses(3))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [(3, ["--manual", "--microbatches=2"]), (4, ["--dp=2", "--microbatches=2"])],
)
def test_ranks_follow_the_plain_script(num_ranks: int, arguments: list[str]):
    output = run_forked(num_ranks, "train_smp.py", "--epochs=3", *arguments)
    check_run(output, plain_losses(3))


@pytest.mark.ranks
def test_two_ranks_follow_the_plain_script():
    expected = epoch_losses(run_forked(1, "train_cpu.py", "--epochs=1"))
    check_run(run_forked(2, "train_smp.py", "--epochs=1", "--manual"), expected)


def check_run(output: str, expected: list[tuple[float, float]]) -> None:
    """The first losses are those of the plain script, and all is printed that should be."""
    actual = epoch_losses(output)[: len(expected)]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=EPOCH_LOSS_TOLERANCE)
    assert re.search(r"^throughput [\d.]+ iterations/s, \d+ samples/s", output, re.MULTILINE)
    for name in ("fc1", "fc2", "fc3"):
        assert name in output.split("final train loss")[1], "the partition table comes last"


@pytest.mark.slow
@pytest.mark.ranks
def test_data_parallel_workers_learn_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPXLA_DEVICE", "torch_xla")  # whose loader the script has
    path = tmp_path / "weights.pt"
    output = run_forked(2, "train_torchrun.py", EPOCHS, f"--checkpoint={path}")
    check_learned(output)
    digits, weights = digits_data.load_digits(), torch.load(path)
    hidden = digits.test_images
    for name in ("fc1", "fc2", "fc3"):
        hidden = hidden if name == "fc1" else hidden.relu()
        hidden = hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    assert (hidden.argmax(dim=1) == digits.test_labels).float().mean() >= 0.9
