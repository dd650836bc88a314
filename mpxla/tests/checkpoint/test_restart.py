"""A training run that is killed in mid-step resumes by itself and ends as if nothing had been."""

import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from mpxla.tests.ranks.run import run_ranks_unpooled

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "examples" / "mnist_mlp" / "train_smp.py"


def options_of(folder, epochs):
    return ["--epochs", str(epochs), "--checkpoint-dir", str(folder), "--checkpoint-every", "5"]


def start(folder, epochs):
    """The example under torchrun, which restarts it when a process dies."""
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(
        [sys.executable, *torchrun, "--max-restarts=9", str(SCRIPT), *options_of(folder, epochs)],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, log


def finish(process, log, timeout_s):
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    log.seek(0)
    output = log.read()
    assert process.returncode == 0, output[-6000:]
    return output


def newest(folder):
    file = folder / "newest"
    return file.read_text() if file.exists() else ""


def kill_one(process, folder, choose):
    """Kills one rank at some moment after the next checkpoint."""
    before = newest(folder)
    deadline = time.monotonic() + 120
    while newest(folder) == before:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(choose.uniform(0, 0.1))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(choose.choice(children)), signal.SIGKILL)


def run_script(path, *arguments):
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_undisturbed(folder, epochs):
    """The same without a launcher, in processes that have imported torch already."""
    words = str(SCRIPT), *options_of(folder, epochs)
    environment = {"MPXLA_DEVICE": os.environ.get("MPXLA_DEVICE", "pjrt")}
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")  # else ranks have others
    results = run_ranks_unpooled(run_script, 2, *words, env=environment)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr[-6000:]
    return results[0].stdout


def epochs_of(output):
    return dict(re.findall(r"^.*epoch +(\d+)/\d+: (.*)$", output, re.MULTILINE))


def check(folder, kills, seed, epochs):
    folder.mkdir()
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    patience_s = 120 * (1 + kills)
    expected = run_undisturbed(undisturbed, epochs)
    process, log = start(killed, epochs)
    choose = random.Random(seed)
    try:
        for _ in range(kills):
            kill_one(process, killed, choose)
        actual = finish(process, log, patience_s)
    finally:
        process.terminate()
        process.wait()
        log.close()
    assert actual.count("resumed from checkpoint") >= kills, "by every rank of a restart"
    shown = epochs_of(actual)
    assert len(epochs_of(expected)) == epochs
    assert shown.items() <= epochs_of(expected).items() and str(epochs) in shown
    assert newest(killed) == newest(undisturbed) != ""
    tag = newest(killed).strip()
    one, other = (run / f"{tag}_partial" for run in (undisturbed, killed))
    losses = [torch.load(f / "user_content.pt")["losses"] for f in (one, other)]
    assert torch.equal(*losses), "bitwise"
    for file in sorted(one.glob("*_0.pt")):
        values, others = torch.load(file), torch.load(other / file.name)
        if file.name.startswith(("model", "optimizer")):
            assert values.keys() == others.keys()
            for name, value in values.items():
                assert torch.equal(value, others[name]), name


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_losses(tmp_path):
    check(tmp_path / "run", kills=1, seed=3, epochs=3)
