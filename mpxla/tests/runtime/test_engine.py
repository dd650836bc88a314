"""One call on each rank of a pipeline: announced, planned, run; on a backend that computes nothing.

The ranks run one after the other: what the first one announced is what the second one follows.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpxla.comm.codec import DATA
from mpxla.comm.stall import Progress
from mpxla.config import Config
from mpxla.env import LaunchEnv
from mpxla.errors import LoweringError, MpxlaError, PeerFailure, RankMismatch, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.cost import MachineModel
from mpxla.runtime import calls
from mpxla.runtime.control import AnnouncedError
from mpxla.runtime.engine import StepEngine
from mpxla.runtime.microbatch import SplitRule
from mpxla.runtime.plans import cutting
from mpxla.runtime.plans.automatic import Choice
from mpxla.runtime.state import ModelState
from mpxla.runtime.states import Member
from mpxla.session import Session
from mpxla.tests.device.null import NullBackend
from mpxla.tests.device.null_steps import NUM_MICROBATCHES, two_layers
from mpxla.topology import Topology

pytestmark = pytest.mark.unit

BATCH = torch.zeros(3 * NUM_MICROBATCHES, 4)


class Objects:
    """All other ranks say what this one says; `others` fail if there is an error for them."""

    others: str | None = None

    def allgather(self, value, ranks):
        is_failure = value is None and self.others is not None
        return [value, *[self.others if is_failure else value] * (len(ranks) - 1)]

    def barrier(self, ranks):
        pass


class Link:
    """Takes note of messages; gives what a stage expects."""

    def __init__(self, backend):
        self.backend, self.calls = backend, backend.calls

    def prepare(self, transfers, placement):
        self.calls.append(f"prepare {len(transfers)} messages")

    def set_placement(self, placement):
        pass

    def send(self, tensors, transfer, channel):
        self.calls.append(f"send {channel}")

    def send_to(self, pp_rank, tensors, channel):
        self.calls.append(f"send {channel}")

    def receive(self, transfer, channel):
        return lambda: self.backend.zeros(transfer.specs)

    def receive_from(self, pp_rank, specs, channel):
        return lambda: self.backend.zeros(specs)


class Reduction:
    objective_scale = 1.0

    def __init__(self, calls):
        self.calls = calls

    def begin(self):
        self.calls.append("begin")

    def start(self, stage, accumulators):
        pass

    def finish(self, accumulators):
        self.calls.append("finish")


class Reducers:
    def __init__(self, calls):
        self.calls = calls

    def equalize(self, label, parameter_ranks, names):
        self.calls.append("equalize")

    def note_written(self, names):
        self.calls.append("note written")

    def prepare(self, cuts, num_microbatches, exchanges):
        return Reduction(self.calls)


class Lifeline:
    """Takes note of failures that the others are told of."""

    def __init__(self):
        self.reports = []

    def report(self, where, error):
        self.reports.append((where, error))

    def check(self):
        pass


class Rank:
    """A rank of a pipeline: its engine, and what that did.

    Attributes:
        told: announcements of the first rank that this one has not followed yet.
        calls: of the backend, the link and the reductions, in order.
    """

    def __init__(self, monkeypatch, rank=0, world=1, told=(), make=two_layers, **keys):
        self.rank, self.told = rank, list(told)
        monkeypatch.setattr(calls, "ControlChannel", lambda *_: self)
        own = {"auto_partition": False, "default_partition": 0, "device_rates": "constant"}
        sizes = {"pipeline_parallel_degree": world, "microbatches": NUM_MICROBATCHES}
        self.backend, self.objects, self.lifeline = NullBackend(), Objects(), Lifeline()
        self.calls = self.backend.calls
        transport = SimpleNamespace(bytes_sent=0)
        self.session = Session(
            Config(**{**own, **sizes, **keys}),
            LaunchEnv(rank=rank, world_size=world),
            Topology(world, world, 1),
            self.backend,
            transport,
            *[self.objects] * 3,
            self.lifeline,
            progress=Progress(),
        )
        self.engine = StepEngine(self.session, Link(self.backend), Reducers(self.calls))
        self.model = model = make()

        def step(x):
            loss = model(x).square().mean()
            current_recorder().backward(loss, None)
            return loss

        self.step = step
        pins = {"model.2": 1} if world > 1 else {}
        self.label = self.engine.add(Member(ModelState(self.model), lambda path: pins, self.placed))

    def placed(self):
        self.calls.append("placed")

    def announce(self, message):
        self.told.append(DATA.dump(message, "a test"))

    def follow(self):
        return DATA.restore(self.told.pop(0), 0, self.rank)

    def call(self, function=None, batch=BATCH, **options):
        rule = SplitRule.of(function or self.step, None, None)
        return self.engine.call(rule, [batch], {}, **options)

    def programs(self):
        return [program.name for program in self.backend.compiled]

    def ran(self):
        """Programs that ran since this was asked last, each with how often."""
        found = {n: self.calls.count(n) for n in self.calls if n.startswith("stage")}
        self.calls.clear()
        return found


@pytest.fixture
def rank(monkeypatch):
    return lambda *given, **keys: Rank(monkeypatch, *given, **keys)


FORWARD, BACKWARD = "stage 0 forward", "stage 0 backward"
EACH = {FORWARD: NUM_MICROBATCHES, BACKWARD: NUM_MICROBATCHES}


def test_the_first_call_places_the_model_then_compiles_then_runs(rank):
    one = rank()
    loss = one.call()
    assert len(loss.outputs) == NUM_MICROBATCHES and one.programs() == [FORWARD, BACKWARD]
    order = ["equalize", "placed", "prepare 0 messages", "begin", FORWARD, BACKWARD, "finish"]
    assert [name for name in dict.fromkeys(one.calls) if name in order] == order
    assert one.ran() == EACH
    assert one.lifeline.reports == []


def test_an_equal_call_runs_the_same_plan_and_another_shape_gets_its_own(rank):
    one = rank()
    one.call()
    one.ran()
    one.call()
    assert one.programs() == [FORWARD, BACKWARD] and one.ran() == EACH
    assert "placed" not in one.calls
    one.call(batch=BATCH[:NUM_MICROBATCHES])
    assert one.programs() == 2 * [FORWARD, BACKWARD] and len(list(one.engine.calls.plans)) == 2
    assert one.ran() == EACH
    one.call()
    assert len(one.programs()) == 4, "the first plan is still known"


def test_other_ranks_follow_what_the_first_announces(rank):
    first = rank(0, 2)
    for _ in range(2):
        first.call()
    second = rank(1, 2, told=first.told)
    for _ in range(2):
        second.call(batch=torch.zeros(0, 4))  # the first rank's tensors count
    assert second.told == []
    assert first.programs() == [FORWARD, BACKWARD]
    assert second.programs() == ["stage 1 forward", "stage 1 backward"]
    assert list(first.ran().values()) == list(second.ran().values()) == 2 * [2 * NUM_MICROBATCHES]


def test_a_rank_that_calls_another_function_says_so_and_tells_the_others(rank):
    first = rank(0, 2)
    first.call()
    second = rank(1, 2, told=first.told)

    def evaluate(x):
        return second.model(x)

    with pytest.raises(RankMismatch, match=r"pp_rank 0 calls the step function .*step while"):
        second.call(evaluate)
    (where, error), *rest = second.lifeline.reports
    assert where.endswith("evaluate") and isinstance(error, RankMismatch) and not rest
    assert second.programs() == []


def test_a_call_that_cannot_be_split_fails_on_all_ranks_and_nobody_else_is_told(rank):
    first = rank(0, 2)
    with pytest.raises(StepError, match="microbatches") as caught:
        first.call(batch=BATCH[:2])
    assert isinstance(caught.value, AnnouncedError)
    second = rank(1, 2, told=first.told)
    with pytest.raises(StepError, match=r"microbatches.*\(found on pp_rank 0\)"):
        second.call()
    assert first.lifeline.reports == second.lifeline.reports == []
    first.call()
    assert first.ran() == EACH, "the session goes on"


def test_inputs_that_a_new_plan_cannot_use_fail_on_all_ranks_before_it_runs(rank):
    def make():
        return nn.Sequential(nn.Embedding(4, 6), nn.Tanh(), nn.Linear(6, 2))

    first, ids = rank(0, 2, make=make), torch.zeros(NUM_MICROBATCHES, 1, dtype=torch.int64)
    with pytest.raises(StepError, match="index 7"):
        first.call(batch=ids + 7)
    second = rank(1, 2, told=first.told, make=make)
    with pytest.raises(StepError, match=r"index 7.*\(found on pp_rank 0\)"):
        second.call(batch=ids)
    for one in first, second:
        assert one.ran() == {} and one.lifeline.reports == []
    first.call(batch=ids)
    assert first.ran() == EACH and len(first.programs()) == 2


def test_an_error_while_building_is_the_ranks_own_and_known_to_all(rank):
    one = rank(0, 2)

    def step(x):
        raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"):
        one.call(step)
    assert one.lifeline.reports == [], "all ranks have exchanged it"

    def compile_(*_, **__):
        raise LoweringError("an operator that nobody has")

    one.backend.compile = compile_
    with pytest.raises(LoweringError, match="an operator that nobody has"):
        one.call()
    assert one.lifeline.reports == [] and len(list(one.engine.calls.plans)) == 0
    del one.backend.compile
    one.call()
    assert one.ran() == EACH, "the session goes on"


def test_an_error_of_another_rank_ends_the_call_before_it_runs(rank):
    one = rank(0, 2)
    one.objects.others = "LoweringError in step: an operator that rank 1 has not"
    with pytest.raises(PeerFailure, match="rank 1 raised LoweringError in step"):
        one.call()
    assert one.ran() == {} and one.lifeline.reports == []


def test_an_error_while_running_is_told_to_the_others(rank):
    one = rank()
    one.call()
    one.backend.compiled[1].inputs = ()
    with pytest.raises(MpxlaError, match="stage 0 backward takes"):
        one.call()
    ((where, error),) = one.lifeline.reports
    assert where.endswith("step") and "stage 0 backward takes" in str(error)


def test_a_copy_of_a_model_cannot_be_trained(rank):
    one = rank()
    one.call()
    one.ran()
    with pytest.raises(StepError, match="called with a copy") as caught:
        one.call(lent={one.label})
    assert isinstance(caught.value, AnnouncedError) and one.ran() == {}
    one.call(lent={"another model"})
    assert one.ran() == EACH


@pytest.mark.parametrize(
    "machine", [MachineModel(task_s=1.0), MachineModel(link_bytes_per_s=1.0), MachineModel()]
)
def test_schedules_are_chosen_and_cuts_made_by_the_rates_of_the_job(rank, monkeypatch, machine):
    given = []

    def choose(config, cut, limit_bytes, machine):
        given.append(machine)
        return Choice({"pipeline": "simple"}, step_s=1.0, rank_bytes=1, default_s=2.0)

    monkeypatch.setattr(cutting, "rates_of_job", lambda session: machine)
    monkeypatch.setattr(cutting, "choose", choose)
    monkeypatch.setattr(cutting, "measure_operators", lambda *_: {})
    one = rank(0, 2, auto_partition=True)
    one.call()
    is_slow = machine != MachineModel()  # steps of seconds are worth it
    assert given == [machine] * is_slow
    assert one.engine._cutter.chosen == ({"pipeline": "simple"} if is_slow else {})
    seconds = sum(one.engine.first_cuts[one.label].problem.forward_s)
    assert seconds == pytest.approx(6 * machine.task_s, rel=0.01), "six operators"
