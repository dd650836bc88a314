"""What the queue of the `xla` transport keeps of the programs that it runs."""

import gc
import threading
import weakref

import pytest
import torch

from mpxla.comm import xla_queue
from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.mesh import Mesh
from mpxla.comm.xla_programs import GraphProgram, Operand, Program
from mpxla.comm.xla_queue import Job, ProgramQueue

pytestmark = pytest.mark.unit

MESH = Mesh(((0,),))
OPERAND = Operand((2,), torch.float32)


class Lowered:
    def __init__(self, program):
        self.program = program


class Runner:
    """Counts what it makes, and returns the operands."""

    loads_alone = True

    def __init__(self):
        self.lowered, self.loaded = weakref.WeakSet(), weakref.WeakSet()
        self.alive_at_the_end = None

    def meet(self, ranks, what, purpose, text):
        pass

    def lower(self, program):
        made = Lowered(program)
        self.lowered.add(made)
        return made

    def fetch(self, operand):
        return operand

    def load(self, lowered):
        made = Lowered(lowered.program)
        self.loaded.add(made)
        return made

    def execute(self, loaded, operands, to_host):
        return list(operands)

    def close(self):
        self.alive_at_the_end = len(self.loaded)


def graph_program():
    return GraphProgram("stage 0 forward", MESH, (OPERAND,), torch.nn.Identity(), (OPERAND,))


def small_programs(count):
    operands = [Operand((size,), torch.float32) for size in range(1, count + 1)]
    return [Program("all_reduce", MESH, (operand,)) for operand in operands]


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def queue(runner):
    made = ProgramQueue(0, FailureWatch(0), runner)
    yield made
    made.close(5.0)


def submit(queue, program):
    handle = Handle(FailureWatch(0), "a program", ())
    return queue.submit(Job(handle, (0,), "ran", "ran", program, [torch.ones(2)], list, True))


def run(queue, program):
    return submit(queue, program).result(timeout_s=5.0)


def test_programs_are_made_once_and_what_is_compiled_is_not_kept_before(queue, runner):
    small, large = Program("all_reduce", MESH, (OPERAND,)), graph_program()
    for program in (small, large, Program("all_reduce", MESH, (OPERAND,)), large):
        assert run(queue, program)[0].tolist() == [1.0, 1.0]
    gc.collect()
    assert (len(runner.lowered), len(runner.loaded)) == (0, 2)


@pytest.mark.parametrize("loads_alone", [True, False])
def test_small_programs_are_bounded_where_a_rank_can_load_one_again(
    queue, runner, monkeypatch, caplog, loads_alone
):
    monkeypatch.setattr(xla_queue, "MAX_PROGRAMS", 2)
    runner.loads_alone = loads_alone
    made, lower = [], runner.lower
    runner.lower = lambda program: made.append(program) or lower(program)
    first, second, third = small_programs(3)
    for program in (first, second, first, third, first):
        run(queue, program)
    assert made == [first, second, third], "the second one was not used for longest"
    run(queue, second)
    assert made[3:] == [second] * loads_alone
    gc.collect()
    assert len(runner.loaded) == (2 if loads_alone else 3)
    assert ("more than 2 programs of messages" in caplog.text) == loads_alone
    graph = graph_program()
    run(queue, graph)
    assert run(queue, first)[0].tolist() == [1.0, 1.0] and graph.made
    assert made[-1] is graph and len(made) == 4 + loads_alone


def test_a_program_that_waits_in_the_queue_is_not_lost(queue, runner, monkeypatch):
    monkeypatch.setattr(xla_queue, "MAX_PROGRAMS", 1)
    started, fetch = threading.Event(), runner.fetch
    runner.fetch = lambda operand: started.wait(5.0) and fetch(operand)
    handles = [submit(queue, program) for program in small_programs(3)]
    started.set()
    for handle in handles:
        assert handle.result(timeout_s=5.0)[0].tolist() == [1.0, 1.0]


def test_a_stages_program_goes_with_the_plan_that_it_is_of(queue, runner):
    program = graph_program()
    run(queue, program)
    run(queue, small := Program("all_reduce", MESH, (OPERAND,)))  # the thread forgets the other
    kept = weakref.ref(program)
    del program
    gc.collect()
    assert kept() is None
    assert [made.program for made in runner.loaded] == [small]


def test_nothing_that_is_loaded_outlives_the_runner(queue, runner):
    program = graph_program()
    run(queue, program)
    run(queue, Program("all_reduce", MESH, (OPERAND,)))
    queue.close(5.0)
    gc.collect()
    assert runner.alive_at_the_end == 0
    assert program.made == {}
