"""Pictures of timelines."""

import json

import pytest

from mpxla.schedule.action import parse_schedule
from mpxla.schedule.generate import interleaved
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.render import chrome_trace, render_text
from mpxla.schedule.simulate import Costs, simulate

pytestmark = pytest.mark.unit

EDGES = {(0, 1), (1, 2)}, {(1, 0), (2, 1)}


def run(num_microbatches=3, costs=None):
    placement = (0, 1, 2)
    compute = interleaved(num_microbatches, placement, 3)
    schedule = add_reduce(add_communication(compute, placement, *EDGES))
    return simulate(schedule, placement, *EDGES, costs)


def test_text_of_1f1b():
    assert render_text(run()).splitlines() == [
        "rank 0  0F0  0F1  0F2  .    .    0B0  .    0B1  .    0B2",
        "rank 1  .    1F0  1F1  .    1B0  1F2  1B1  .    1B2  .",
        "rank 2  .    .    2F0  2B0  2F1  2B1  2F2  2B2  .    .",
        "makespan 10, bubble 40.0 %, microbatches in flight per stage: 3 2 1",
    ]


def test_long_actions_go_on():
    assert render_text(run(1, Costs(backward=2))).splitlines() == [
        "rank 0  0F0  .    .    .    .    .    .    0B0  =",
        "rank 1  .    1F0  .    .    .    1B0  =    .    .",
        "rank 2  .    .    2F0  2B0  =    .    .    .    .",
        "makespan 9, bubble 66.7 %, microbatches in flight per stage: 1 1 1",
    ]


def test_transfers_are_arrows():
    timeline = simulate(
        parse_schedule("0F0 0SEND_F0>1\n1RECV_F0<0 1F0"), (0, 1), {(0, 1)}, (), Costs(transfer=2)
    )
    assert render_text(timeline).splitlines()[:2] == [
        "rank 0  0F0  >    =    .",
        "rank 1  .    <    =    1F0",
    ]


def test_a_timeline_gets_no_more_columns_than_there_may_be():
    for count in (3, 4, 5):
        assert len(render_text(run(), max_columns=count).splitlines()[0].split()) == 2 + count


def test_a_timeline_without_time():
    timeline = simulate(parse_schedule("0F0"), (0,), (), (), Costs(forward=0))
    assert render_text(timeline).splitlines()[0] == "rank 0"


def test_chrome_trace_has_every_action():
    timeline = run()
    trace = chrome_trace(timeline, us_per_unit=10.0)
    assert json.loads(json.dumps(trace)) == trace
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = [(e["tid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in slices]
    assert found == [
        (rank, str(span.action), span.start * 10, span.end * 10)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    ]
    backward = next(event for event in slices if event["name"] == "1B2")
    assert backward["cat"] == "backward"
    assert backward["args"] == {"stage": 1, "microbatch": 2}


def test_chrome_trace_names_the_ranks():
    names = [
        (event["tid"], event["args"]["name"])
        for event in chrome_trace(run())["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert names == [(0, "rank 0"), (1, "rank 1"), (2, "rank 2")]


def test_chrome_trace_has_an_arrow_per_message():
    timeline = run(costs=Costs(transfer=0.5))
    events = chrome_trace(timeline, us_per_unit=1.0)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(finishes) == 3 * 2 * 2
    for number, start in starts.items():
        finish = finishes[number]
        assert start["ts"] < finish["ts"]
        assert abs(start["tid"] - finish["tid"]) == 1
        assert start["name"] == finish["name"]
    arrow = next(number for number, e in starts.items() if e["name"] == "1SEND_B2>0")
    (backward,) = (s for s in timeline.spans[0] if str(s.action) == "0B2")
    assert (finishes[arrow]["tid"], finishes[arrow]["ts"]) == (0, backward.start)
