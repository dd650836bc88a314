"""Numbers of steps: what `smp.metrics` says, the log line, scalars, files and the page of `top`."""

import itertools
import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.cli.main import main
from mpxla.cli.top import rows
from mpxla.errors import MpxlaError
from mpxla.runtime.watching.metrics import Meter, MetricsFile
from mpxla.runtime.watching.sign_of_life import SignOfLife
from mpxla.tests.ranks.run import run_ranks

STAGES = 2
MICROBATCHES = 3
SAMPLES = 6
WIDTH = 500


def meter(num_replicas=1):
    backend = SimpleNamespace(num_compilations=2, memory_counters=lambda: {"bytes_used": 3 << 20})
    return Meter(backend, SimpleNamespace(bytes_sent=5 << 20), num_replicas)


@pytest.mark.unit
def test_numbers_of_calls():
    found = meter(num_replicas=2)
    assert found.read()["step_s"] is None and found.read()["waiting"] is None
    found.note_call("train", True, (10.0, 11.0), 0.25, 6)
    assert (found.read()["step_s"], found.read()["waiting"]) == (1.0, 0.25)
    for begin in (14.0, 16.0, 18.0):
        found.note_call("train", True, (begin, begin + 1), 0.5, 6)
    found.note_call("evaluate", False, (19.0, 29.0), 9.0, 100)
    found.note_compilation(1.5)
    assert found.read() == {
        "function": "train",
        "steps": 4,
        "step_s": 2.0,  # median of 4, 2, 2
        "samples_per_s": 6.0,  # 2 replicas with 6 samples in 2 s
        "waiting": pytest.approx((0.25 + 0.5 + 0.5) / 8),
        "compilations": 2,
        "compile_s": 1.5,
        "bytes_sent": 5 << 20,
        "memory_bytes": 3 << 20,
    }
    assert found.line() == (
        "step 4 of train: 2 s, 6 samples/s, waiting 16 %, memory 3 MiB, sent 5.0 MiB, "
        "2 compilations in 1.5 s"
    )


@pytest.mark.unit
def test_only_the_last_calls_count():
    found = meter()
    found.note_call("train", True, (0.0, 1.0), 0.0, None)
    for begin in range(100, 121):
        found.note_call("train", True, (float(begin), begin + 0.5), 0.0, None)
    assert found.read()["step_s"] == 1.0
    assert found.read()["samples_per_s"] is None
    assert "samples" not in found.line()


@pytest.mark.unit
def test_metrics_need_a_model():
    with pytest.raises(MpxlaError, match="not been called"):
        smp.metrics()


def train(log_every, folder):
    """Metrics after three training steps and an evaluation, and the scalars written of them."""
    smp.init(
        {
            "pipeline_parallel_degree": STAGES,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
            "log_metrics_every": log_every,
            "metrics_dir": folder,
        }
    )
    with pytest.raises(MpxlaError, match=r"before smp\.DistributedModel"):
        smp.metrics()
    net = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)

    @smp.step(non_split_inputs=["scale"])
    def step(model, scale, x):
        loss = (model(x) * scale).square().mean()
        model.backward(loss)
        return {}

    @smp.step
    def evaluate(model, x):
        model(x).sum()
        return {}

    scale = torch.ones(7)[:1]
    step(model, scale, torch.randn(SAMPLES, 4))
    sent = [smp.metrics()["bytes_sent"]]
    for _ in range(2):
        step(model, scale, torch.randn(SAMPLES, 4))
        sent.append(smp.metrics()["bytes_sent"])
    evaluate(model, torch.randn(SAMPLES, 4))
    scalars = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, at: scalars.update({name: (value, at)}))
    smp.write_metrics(writer, 7)
    return smp.metrics(), sent, scalars


@pytest.mark.ranks
def test_a_job_is_measured_and_watched(tmp_path):
    ranks = run_ranks(train, STAGES, 2, str(tmp_path))
    for rank, (found, sent, scalars) in enumerate(ranks):
        assert found["function"] == "step" and found["steps"] == 3
        assert found["compilations"] >= 3 and found["compile_s"] > 0 and found["step_s"] > 0
        assert found["memory_bytes"] > 1 << 20 and 0 <= found["waiting"] <= 1
        # A sample of float32 per crossing value: hidden one way, its gradient the other way.
        crossing = SAMPLES * WIDTH * 4
        for before, after in itertools.pairwise(sent):
            assert crossing <= after - before < crossing + 1500, "announcements are small"
        assert scalars["mpxla/steps"] == (3, 7)
        if rank == 0:
            assert found["samples_per_s"] == pytest.approx(SAMPLES / found["step_s"])
        else:
            assert found["samples_per_s"] is None and "mpxla/samples_per_s" not in scalars
    assert [row[:1] + row[2:4] for row in rows(tmp_path, time.time())] == [
        ("0", "ended", "3"),
        ("1", "ended", "3"),
    ]


def log_of_training(log_every):
    import contextlib
    import io

    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        train(log_every, None)
    return heard.getvalue()


@pytest.mark.ranks
def test_rank_0_logs_every_so_many_steps():
    first, second = run_ranks(log_of_training, STAGES, 2)
    lines = [line for line in first.splitlines() if re.search(r"step \d+ of step: ", line)]
    assert len(lines) == 1 and lines[0].startswith("[mpxla rank 0] step 2 of step: ")
    assert " of step: " not in second


def write(folder, rank, world_size, state, age_s=0.0):
    values = meter().read() | {"state": state}
    MetricsFile(folder, rank, world_size, lambda: values).close()
    path = folder / f"rank-{rank:05d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": state}))
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.unit
def test_top_says_who_is_silent_and_forgets_earlier_jobs(tmp_path, capsys):
    write(tmp_path, 2, 3, "in a step", age_s=500)
    write(tmp_path, 1, 2, "compiling step function f: stage 1 forward", age_s=60)
    write(tmp_path, 0, 2, "in a step")
    first, second = rows(tmp_path, time.time())
    assert (first[0], first[2], second[0]) == ("0", "in a step", "1")
    assert re.fullmatch(r"silent for 6\d s, last compiling step function f: .*", second[2])
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "samples/s" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "no"), "--once"]) == 1
    assert "Start the job with the configuration key metrics_dir" in capsys.readouterr().err


@pytest.mark.unit
def test_the_page_is_drawn_until_it_is_interrupted(tmp_path, capsys, monkeypatch):
    write(tmp_path, 0, 1, "in a step")
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", str(tmp_path), "--interval", "3"]) == 0
    assert looks == [3.0, 3.0]
    assert "in a step" in capsys.readouterr().out


@pytest.mark.unit
def test_a_long_work_gives_signs_of_life():
    lines = []

    def hear(line):
        lines.append(line)
        if len(lines) == 1:
            life.at("stage 0 backward")

    life = SignOfLife(hear, pauses_s=(0.0, 0.01))
    with life.during("compiling step function f", "capture"):
        while len(lines) < 2:
            time.sleep(0.01)
        assert life.what == "compiling step function f: stage 0 backward"
    assert life.what == ""
    assert re.fullmatch(r"still compiling step function f: capture for \d+ s", lines[0])
    told = r"still compiling step function f: stage 0 backward for \d+ s, \d+ s in all"
    assert re.fullmatch(told, lines[1])


@pytest.mark.unit
def test_other_ranks_are_silent_and_a_short_work_says_nothing():
    lines = []
    for life in (SignOfLife(None, (0.0,)), SignOfLife(lines.append, (100.0,))):
        with life.during("compiling", "capture"):
            assert life.what == "compiling: capture"
    assert lines == []


def parts_of_a_compilation():
    """What the sign of life would say while two stages' programs are made."""
    from mpxla.runtime.watching import sign_of_life

    parts = []
    original = sign_of_life.SignOfLife.at

    def at(self, part):
        parts.append(part)
        original(self, part)

    sign_of_life.SignOfLife.at = at
    try:
        train(0, None)
    finally:
        sign_of_life.SignOfLife.at = original
    return parts


@pytest.mark.ranks
def test_the_compilation_says_what_it_does():
    for rank, parts in enumerate(run_ranks(parts_of_a_compilation, STAGES)):
        waiting = "done here, waiting for other ranks"
        programs = [f"lowering of stage {rank}", f"stage {rank} forward", f"stage {rank} backward"]
        training = ["capture", "partition", waiting, *programs, waiting]
        assert parts[: len(training)] == training
