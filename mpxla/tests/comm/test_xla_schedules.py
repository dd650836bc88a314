"""What ranks do over `xla` in a step is free of deadlock under the rules of loading and rendezvous.

The real transport runs on one thread per rank; its programs are recorded, and nothing is computed.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from mpxla.comm.transport import Use
from mpxla.comm.xla import XlaTransport
from mpxla.errors import RankMismatch, ScheduleError
from mpxla.schedule.action import Op, parse_schedule
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import simulate
from mpxla.tests.comm.recorder import Kind, Recorder, check
from mpxla.tests.comm.threads import threads_world

pytestmark = pytest.mark.unit

SPECS = (torch.empty(2, 3), torch.empty((), dtype=torch.int64), torch.empty(4, dtype=torch.bool))


class DryRunner:
    """Goes through the motions; every result is zeros."""

    loads_alone = True

    def meet(self, ranks, what, purpose, text):
        pass

    def lower(self, program):
        return program

    def fetch(self, operand):
        return operand

    def load(self, lowered):
        return lowered

    def execute(self, loaded, operands, to_host):
        (first, *_), count = loaded.operands, len(loaded.mesh.groups[0])
        if loaded.op == "transfer":
            return [torch.zeros(o.shape, dtype=o.dtype) for o in loaded.operands]
        shapes = {"all_gather": (count, *first.shape), "reduce_scatter": (1, *first.shape[1:])}
        return [torch.zeros(shapes.get(loaded.op, first.shape), dtype=first.dtype)]

    def close(self):
        pass


def record(schedule, placement, pp, dp=1, prepare=True, lengths=range(10, 100)):
    """Recordings of a step of `dp` pipelines; rank = replica * pp + pipeline rank.

    `lengths` are those of the gradients that are reduced, by pipeline rank or by rank.
    """
    pipelines = [tuple(range(d * pp, (d + 1) * pp)) for d in range(dp)]
    replicas = [tuple(range(p, dp * pp, pp)) for p in range(pp)]
    world = tuple(range(dp * pp))

    def on_rank(host):
        pipeline, own = pipelines[host.rank // pp], replicas[host.rank % pp]
        recorder = Recorder(DryRunner(), host.rank)
        transport = XlaTransport(host, recorder, pipelines)
        transport.make_groups([world, *pipelines, *replicas])
        actions = schedule[host.rank % pp]
        bucket = torch.empty(lengths[host.rank if len(lengths) == len(world) else host.rank % pp])
        messages = [
            Use("message", _ends(a, placement, pipeline), SPECS)
            for a in actions
            if a.peer is not None
        ]
        sums = [Use("all_reduce", own, (bucket,)) for a in actions if a.op is Op.REDUCE]
        if prepare:
            transport.prepare([*messages, *sums], world)
        for action in actions:
            channel = "forward" if action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD) else "backward"
            if action.op.is_send:
                transport.send(SPECS, pipeline[placement[action.peer]], channel)
            elif action.op.is_receive:
                transport.recv(SPECS, pipeline[placement[action.peer]], channel)
            elif action.op is Op.REDUCE:
                transport.all_reduce(bucket, own)
        transport.close()
        return recorder.events

    with ThreadPoolExecutor(len(world)) as pool:
        return list(pool.map(on_rank, threads_world(len(world))))


def _ends(action, placement, pipeline):
    ends = action.stage, action.peer
    source, target = ends if action.op.is_send else reversed(ends)
    return pipeline[placement[source]], pipeline[placement[target]]


def step(pipeline, count, placement, edges, training=True):
    """Schedule of a step with gradients for every edge."""
    backward = {(b, a) for a, b in edges}
    compute = generate(pipeline, count, placement, len(placement) + 2, training)
    schedule = add_communication(compute, placement, edges, backward)
    schedule = add_reduce(schedule) if training else schedule
    simulate(schedule, placement, edges, backward)
    return schedule


def chain(num_stages):
    return {(stage, stage + 1) for stage in range(num_stages - 1)}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_rule_1_steps_are_one_sequence_on_all_members(stages, dp):
    placement = tuple(range(stages))
    for pipeline, count in product(("interleaved", "simple"), (1, 2, 5)):
        schedule = step(pipeline, count, placement, chain(stages))
        recordings = record(schedule, placement, stages, dp)
        check(recordings, whole_mesh=True)
        executed = [e.program.op for e in recordings[0] if e.kind is Kind.EXECUTE]
        assert executed.count("transfer") == 2 * count
        assert executed.count("all_reduce") == 1 + (dp > 1)


def test_rule_1_a_rank_that_does_something_else_is_found():
    recordings = record(step("interleaved", 3, (0, 1), chain(2)), (0, 1), 2)
    executions = [i for i, e in enumerate(recordings[1]) if e.kind is Kind.EXECUTE]
    first, second = executions[1:3]
    recordings[1][first], recordings[1][second] = recordings[1][second], recordings[1][first]
    with pytest.raises(RankMismatch, match="ranks 0 and 1 disagree on the order"):
        check(recordings)
    del recordings[1][second]
    with pytest.raises(RankMismatch):
        check(recordings)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "placement"),
    [(3, (0, 1, 2, 0, 1, 2)), (4, (0, 1, 2, 3) * 2), (2, (0, 1, 1, 0)), (3, (0, 1, 2, 1, 0))],
)
def test_rule_4_rings_and_returns_of_even_and_odd_length(ranks, placement, dp):
    schedule = step("interleaved", 4, placement, chain(len(placement)))
    check(record(schedule, placement, ranks, dp), whole_mesh=True)


def test_rule_4_values_that_skip_stages():
    edges = chain(4) | {(0, 2), (0, 3), (1, 3)}
    check(record(step("interleaved", 4, (0, 1, 2, 3), edges), (0, 1, 2, 3), 4, 2), whole_mesh=True)


def test_rule_6_programs_are_loaded_before_the_step_in_one_order():
    recordings = record(step("interleaved", 4, (0, 1, 2), chain(3)), (0, 1, 2), 3, 2)
    orders = []
    for events in recordings:
        kinds = [event.kind for event in events[2:]]  # after the warm-up
        loads = kinds.count(Kind.LOAD)
        assert loads == 7
        assert kinds == [Kind.LOAD] * loads + [Kind.EXECUTE] * (len(kinds) - loads)
        orders.append([event.program for event in events[2:] if event.kind is Kind.LOAD])
    assert all(order == orders[0] for order in orders)


def test_rule_6_without_preparation_members_load_at_their_first_use():
    """Which is enough where a load waits for the own group only."""
    recordings = record(step("simple", 2, (0, 1), chain(2)), (0, 1), 2, 2, prepare=False)
    check(recordings)
    with pytest.raises(RankMismatch, match="disagree on the shapes"):
        check(recordings, whole_mesh=True)


@pytest.mark.parametrize("dp", [1, 2])
def test_rule_7_a_sum_over_all_ranks_comes_first(dp):
    for events in record([[], []], (0, 1), 2, dp):
        load, execute = events
        assert (load.kind, execute.kind) == (Kind.LOAD, Kind.EXECUTE)
        assert load.program == execute.program
        assert load.program.op == "all_reduce"
        assert load.group == tuple(range(2 * dp))


def test_rule_8_what_only_buffers_would_save_is_refused():
    """Both ranks send before they receive: fine with buffers, a deadlock for two-rank programs."""
    crossed = parse_schedule(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
        """
    )
    edges = {(0, 1)}, {(1, 0)}
    simulate(crossed, (0, 1), *edges, rendezvous=False)
    with pytest.raises(ScheduleError, match="Deadlock"):
        simulate(crossed, (0, 1), *edges)
    with pytest.raises(RankMismatch, match="ranks 0 and 1 disagree on the order"):
        check(record(crossed, (0, 1), 2))


def test_rule_10_reductions_of_unequal_size_are_found():
    schedule = step("simple", 1, (0, 1), chain(2))
    recordings = record(schedule, (0, 1), 2, 2, lengths=(10, 10, 10, 11))
    with pytest.raises(RankMismatch, match="ranks 1 and 3 disagree on the shapes"):
        check(recordings)
