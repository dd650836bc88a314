"""What the queue of the `xla` transport keeps of the programs that it runs."""

import gc
import weakref

import pytest
import torch

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


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def queue(runner):
    made = ProgramQueue(0, FailureWatch(0), runner)
    yield made
    made.close(5.0)


def run(queue, program):
    handle = Handle(FailureWatch(0), "a program", ())
    job = Job(handle, (0,), "ran", "ran", program, [torch.ones(2)], list, to_host=True)
    return queue.submit(job).result(timeout_s=5.0)


def test_programs_are_made_once_and_what_is_compiled_is_not_kept_before(queue, runner):
    small, large = Program("all_reduce", MESH, (OPERAND,)), graph_program()
    for program in (small, large, Program("all_reduce", MESH, (OPERAND,)), large):
        assert run(queue, program)[0].tolist() == [1.0, 1.0]
    gc.collect()
    assert (len(runner.lowered), len(runner.loaded)) == (0, 2)


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
