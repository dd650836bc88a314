"""What `smp.profile` records on two ranks, what the file holds, and what `trace` says about it."""

import json
from itertools import pairwise

import pytest
import torch

import mpxla as smp
from mpxla.cli.main import main
from mpxla.errors import MpxlaError
from mpxla.tests.models import Gpt, predict_tokens, tokens
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


OFFLOAD = {"offload_activations": True, "activation_loading_horizon": 1}


def profiled(path, pipeline, keys):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": pipeline, **keys})
    torch.manual_seed(1)
    model = smp.DistributedModel(Gpt())
    step = smp.step(predict_tokens)
    torch.manual_seed(1)  # the masks of the last step below
    plain = [loss.item() for loss in step(model, tokens(8))["loss"].outputs]
    with smp.profile(path):
        torch.manual_seed(2)
        step(model, tokens(8))
        torch.manual_seed(1)
        smp.barrier()
        nested = None
        try:
            with smp.profile(path):
                pass
        except MpxlaError as error:
            nested = str(error)
        again = [loss.item() for loss in step(model, tokens(8))["loss"].outputs]
    empty = smp.profile(path)
    try:
        with empty:
            pass
    except MpxlaError as error:
        return plain, again, nested, str(error)
    return plain, again, nested, None


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "trace.json"
    results = run_ranks(profiled, 2, path, "zero_bubble", {}, timeout_s=120)
    return path, results


def test_wrong_use_is_explained(trace):
    for _, _, nested, empty in trace[1]:
        assert "a profile is being recorded already. End it" in nested
        assert "recorded nothing, because no step function ran" in empty


def test_every_action_of_every_rank_is_there(trace):
    from mpxla.runtime.watching.trace import load_trace, measured_timeline, pipelines
    from mpxla.schedule.action import parse_schedule

    (group,) = pipelines(load_trace(trace[0]))
    assert [rank["rank"] for rank in group] == [0, 1]
    for number in (0, 1):
        timeline = measured_timeline(group, number)
        plan = group[0]["steps"][number]["plan"]
        assert [list(actions) for actions in timeline.schedule] == parse_schedule(plan["schedule"])
        for spans in timeline.spans:
            assert all(span.end >= span.start >= 0 for span in spans)
            computes = [span for span in spans if span.action.op.is_compute]
            assert all(a.end <= b.start for a, b in pairwise(computes))


def test_a_program_starts_after_what_it_reads(trace):
    """Clocks of ranks agree, and waits end before programs begin."""
    from mpxla.runtime.watching.trace import load_trace, measured_timeline, pipelines

    (group,) = pipelines(load_trace(trace[0]))
    timeline = measured_timeline(group, 1)
    when = {str(span.action): span for spans in timeline.spans for span in spans}
    for microbatch in range(4):
        assert when[f"0F{microbatch}"].end <= when[f"1F{microbatch}"].start
        assert when[f"1I{microbatch}"].end <= when[f"0W{microbatch}"].start


def test_perfetto_gets_measured_beside_predicted(trace):
    events = json.loads(trace[0].read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured", "predicted"]
    for pid in names:
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert {e["tid"] for e in spans} == {0, 1}
        assert sum(e["name"] == "1F2" for e in spans) == 2, "once in each of two steps"
        assert all(e["dur"] >= 0 and e["ts"] >= -1e-6 for e in spans)


def test_memory_over_time_is_beside_the_timeline(trace):
    from mpxla.runtime.watching.trace import load_trace, measured_memory, pipelines

    (group,) = pipelines(load_trace(trace[0]))
    events = json.loads(trace[0].read_text())["traceEvents"]
    for rank, curve in enumerate(measured_memory(group, 0)):
        sizes = [size for _, size in curve]
        assert sizes[0] == sizes[-1] == 0 and max(sizes) > 0
        forecast = group[rank]["steps"][0]["plan"]["held_bytes"]
        assert sizes[1:] == pytest.approx(forecast, rel=0.05), "action by action"
        for pid in (0, 1):
            drawn = [
                event["args"]["bytes"]
                for event in events
                if event["ph"] == "C" and (event["pid"], event["tid"]) == (pid, rank)
            ]
            assert max(drawn) == pytest.approx(max(sizes), rel=0.05)
            assert len(drawn) >= 2 * (len(sizes) - 1), "of both steps"


@pytest.mark.slow
def test_copies_have_rows_of_their_own(tmp_path):
    from mpxla.runtime.watching.trace import load_trace, pipelines

    path = tmp_path / "trace.json"
    for plain, again, _, _ in run_ranks(profiled, 2, path, "simple", OFFLOAD, timeout_s=120):
        assert plain == again
    (group,) = pipelines(load_trace(path))
    events = json.loads(path.read_text())["traceEvents"]
    for rank in group:
        for step in rank["steps"]:
            begun = [a["action"] for a in step["actions"] if "LOAD" in a["action"]]
            assert sorted(copy["action"] for copy in step["copies"]) == sorted(begun) != []
            sizes = [action["held_bytes"] for action in step["actions"]]
            assert sizes == pytest.approx(step["plan"]["held_bytes"], rel=0.05)
        drawn = [e["name"] for e in events if (e["pid"], e.get("tid")) == (2, rank["rank"])]
        assert drawn.count(begun[0]) == 2, "once in each of two steps"
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    assert main(["trace", str(path), "--output", str(tmp_path / "trace.png")]) == 0


def test_trace_says_where_the_time_went(trace, capsys, tmp_path):
    assert main(["trace", str(trace[0]), "--step", "0"]) == 0
    text = capsys.readouterr().out
    assert "step 0, mpxla.tests.models.predict_tokens" in text
    assert "predicted from operation counts" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all("rank" in row for row in rows), "each waited for the other"
    for row in rows:
        shares = [int(word) for word, unit in pairwise(row) if unit == "%"]
        assert sum(shares) == pytest.approx(100, abs=4)


def test_trace_draws(trace, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    picture = tmp_path / "trace.png"
    assert main(["trace", str(trace[0]), "--output", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "7"), "--step 7: the trace has steps 0 to 1"),
        (("--output", "x.svg"), "trace draws PNG files"),
    ],
)
def test_trace_refuses(trace, capsys, words, message):
    assert main(["trace", str(trace[0]), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.unit
def test_files_that_are_no_traces(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    old = tmp_path / "old.json"
    old.write_text('{"mpxla": {"version": 0, "ranks": []}}')
    for path, message in (
        (tmp_path / "absent.json", "cannot be read: No such file"),
        (other, "is not a trace that smp.profile wrote"),
        (old, "has version 0 of mpxla's traces, and this mpxla reads 3"),
    ):
        assert main(["trace", str(path)]) == 1
        assert message in capsys.readouterr().err
