"""The history of the quick benchmark: what is noted, and compared with what."""

import json

import pytest

pytestmark = pytest.mark.unit


@pytest.fixture
def quick(benchmark_module):
    return benchmark_module("quick")


def rank(number, **values):
    same = {"compilations": 3 + number, "dispatch_ms": 0.2, "update_ms": 1.0, "first_s": 4.0}
    return {"rank": number, "step_bytes": 5_000_000, **same, **values}


def found(quick, error=None):
    def run(times, ranks):
        return {"times_s": times, "ranks": ranks, "error": None}

    return {
        str(quick.EAGER): run([1.0, 2.0, 4.0], [rank(0)]),
        str(quick.INDUCTOR): run([1.0, 1.5, 1.0], [rank(0)]),
        str(quick.ONE): run([0.5, 1.5, 2.0], [rank(0)]),
        str(quick.PEER): {"times_s": [], "ranks": [], "error": error} if error else run([1.0], []),
        str(quick.TWO): run([0.9, 0.5, 0.8], [rank(0), rank(1, dispatch_ms=0.4)]),
    }


def test_ratios_are_taken_in_turns_and_the_worst_rank_counts(quick):
    new = quick.record(found(quick))
    numbers = new["numbers"]
    assert numbers["one rank / eager"] == 0.5, "the median of the ratios, not a ratio of medians"
    assert numbers["one rank / torch.compile"] == 1.0
    assert numbers["two ranks / pipelining"] == 0.9
    assert "two ranks / pipelining, compiled" not in numbers, "that peer did not take part"
    assert numbers["mpxla_default x2: compilations"] == 4
    assert numbers["mpxla_default x2: dispatch, CPU ms per task"] == 0.4
    assert numbers["mpxla_default x2: first step / a step"] == 5.0
    assert numbers["mpxla_default x1: memory of a step, MB"] == 5.0 and new["errors"] == {}


def test_a_peer_that_fails_is_named_and_leaves_the_rest(quick):
    new = quick.record(found(quick, error="gloo is gone"))
    assert "two ranks / pipelining" not in new["numbers"] and "one rank / eager" in new["numbers"]
    assert quick.table(new, None)[-1].endswith("torch_pipelining x2 does not run: gloo is gone")


def test_a_run_is_compared_with_the_last_one_on_the_same_kind_of_machine(quick, tmp_path):
    history = tmp_path / "history.jsonl"
    assert quick.last_of(history, "here") is None
    entries = [
        {"machine": "here", "numbers": {"one rank / eager": 0.8}, "errors": {}},
        {"machine": "here", "numbers": {"one rank / eager": 0.5, "new": 0}, "errors": {}},
        {"machine": "there", "numbers": {"one rank / eager": 9.0}, "errors": {}},
    ]
    history.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    old = quick.last_of(history, "here")
    assert old == entries[1]
    now = {"numbers": {"one rank / eager": 0.56, "more": 1.0}, "errors": {}}
    assert quick.table(now, old)[2:] == [
        "| one rank / eager | 0.56 | 0.5 | +12 % |",
        "| more | 1 | - |  |",
    ]


def test_the_history_is_drawn_the_same_way_each_time(quick, tmp_path):
    pytest.importorskip("matplotlib")
    history, picture = tmp_path / "history.jsonl", tmp_path / "history.svg"
    entry = {"date": "2026-11-23 12:00", "errors": {}}
    lines = [
        {**entry, "machine": machine, "numbers": {"one rank / eager": ratio}}
        for machine, ratio in (("here", 0.8), ("there", 0.9), ("here", 0.7))
    ]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    quick.draw(history, picture)
    first = picture.read_text()
    assert "<svg" in first and first.count("one rank / eager") == 1
    quick.draw(history, picture)
    assert picture.read_text() == first


def test_the_machine_is_a_kind_not_a_name(quick):
    import platform

    assert platform.node() not in quick.machine_kind() and " cores" in quick.machine_kind()
