"""`python -m mpxla run`: scripts on several processes, and what is said of those that fail."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpxla import env
from mpxla.cli.main import main
from mpxla.cli.run import failure_text

REPOSITORY = Path(__file__).parents[3]

SCRIPT = """\
import sys

import mpxla as smp
from beside_it import word

smp.init({"ddp": True})
print(f"{word} {sys.argv[1:]} {smp.rank()} of {smp.size()} in {__name__}", flush=True)
smp.barrier()
if "fail" in sys.argv and smp.rank() == 1:
    raise ValueError("a rank of mine")
smp.barrier()
smp.shutdown()
"""


def launch(folder, *words):
    (folder / "beside_it.py").write_text('word = "hello"\n')
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "MPXLA_DEVICE": "eager", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "mpxla", "run", "-n", "2", str(folder / "script.py"), *words]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_a_failure_is_named_once(tmp_path):
    done = launch(tmp_path, "fail", "--n", "7", "--ranks", "1")
    assert done.returncode == 1
    for rank in range(2):
        assert f"hello ['fail', '--n', '7', '--ranks', '1'] {rank} of 2 in __main__" in done.stdout
    assert len(re.findall(r"raise ValueError\(", done.stderr)) == 1, done.stderr
    # torchrun may look while rank 1 is still ending, and see rank 0 alone.
    one, other = "rank 1 of 2 failed: ValueError", "rank 0 of 2 failed: PeerFailure: rank 1 raised"
    assert f"error: {one}: a rank of mine" in done.stderr or f"error: {other}" in done.stderr
    for phrase in ("ChildFailedError", "runpy", "error_file", "Setting OMP_NUM_THREADS"):
        assert phrase not in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_that_ends(tmp_path):
    done = launch(tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


def refusal(capsys, *words):
    assert main(["run", *words]) == 1
    return capsys.readouterr().err


@pytest.mark.unit
def test_refusals(capsys):
    assert refusal(capsys, "nowhere.py") == "error: there is no file nowhere.py\n"
    text = refusal(capsys, "-n", "0", "nowhere.py")
    assert text == "error: -n 0: at least one process is needed\n"


@pytest.mark.unit
def test_an_interruption_is_one_line(capsys, monkeypatch, tmp_path):
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def interrupted(settings):
        assert settings.training_script_args == [str(script), "--n", "7"]
        raise SignalException("told to stop", signal.SIGINT)

    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torchrun, "run", interrupted)
    text = refusal(capsys, str(script), "--n", "7")
    assert text == "error: stopped by SIGINT; the ranks have ended too\n"


@pytest.mark.unit
def test_cores_are_divided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda process: set(range(8)))
    assert [env.cores_per_process(count) for count in (1, 3, 4, 16)] == [8, 2, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert env.cores_per_process(4) == 5


def failure(timestamp, message=None, exitcode=1):
    data = {"message": {"message": message}} if message else {}
    return SimpleNamespace(
        timestamp=timestamp,
        exitcode=exitcode,
        error_file_data=data,
        signal_name=lambda: {9: "SIGKILL", 15: "SIGTERM"}[-exitcode],
    )


@pytest.mark.unit
def test_the_cause_comes_before_its_consequences():
    failures = {
        0: failure(5, "PeerFailure: rank 2 raised\nand more"),
        1: failure(4, exitcode=-15),
        2: failure(6, "ValueError: no\nsecond line"),
        3: failure(7, exitcode=3),
    }
    assert failure_text(failures, 4).splitlines() == [
        "rank 2 of 4 failed: ValueError: no",
        "second line",
        "  rank 3: exited with code 3",
        "  rank 1: was killed by SIGTERM",
        "  rank 0: PeerFailure: rank 2 raised",
    ]
    assert failure_text({1: failure(1, exitcode=-9)}, 2) == (
        "rank 1 of 2 failed: was killed by SIGKILL"
    )
