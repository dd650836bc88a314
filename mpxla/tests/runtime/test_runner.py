"""One call of a compiled step on a backend that computes nothing."""

from types import SimpleNamespace

import pytest
import torch

from mpxla.comm.stall import Progress
from mpxla.runtime.call import Call
from mpxla.runtime.constants import Constants
from mpxla.runtime.index_checks import IndexChecks
from mpxla.runtime.passes import CallRunner
from mpxla.runtime.plans.cache import Plan
from mpxla.runtime.runner import PlanRunner
from mpxla.runtime.step_writes import StepWrites
from mpxla.runtime.ways import Pass
from mpxla.tests.device.null import NullBackend
from mpxla.tests.device.null_steps import NUM_MICROBATCHES, plan_of, two_layers

pytestmark = pytest.mark.unit


class States:
    """The parameters of `two_layers`."""

    def __init__(self):
        self.model = two_layers()

    def local_tensors(self):
        return dict(self.model.named_parameters())


class Link:
    def set_placement(self, placement):
        self.placement = placement


class Reducers:
    """Of a rank without replicas."""

    def note_written(self, names):
        assert not names


class Reduction:
    """Takes note of what it is given."""

    objective_scale = 0.5

    def __init__(self):
        self.events = []

    def begin(self):
        self.events.append("begin")

    def start(self, stage, accumulators):
        self.events.append(("start", stage, len(accumulators[stage])))

    def finish(self, accumulators):
        self.events.append(("finish", sorted(accumulators)))


def runner_of(is_training):
    backend = NullBackend()
    plan = plan_of(backend, is_training=is_training)
    reduction = Reduction() if is_training else None
    checks = IndexChecks("off", plan.cut.step, backend)
    states = States()
    backend.calls.clear()
    writes = StepWrites(plan.cut.step, states, backend, None, (0,))
    runner = PlanRunner(
        *(plan, states, Link(), 0, backend, reduction, ("model",), checks),
        *(writes, Constants(backend), None, (0,)),
    )
    return backend, runner, reduction


def call(runner):
    leaves = [[torch.zeros(3, 4)] for _ in range(NUM_MICROBATCHES)]
    plan = Plan(0, None, SimpleNamespace(reads=()), runner, list)
    runs = CallRunner(runner._states, Reducers(), runner._backend, None, Progress())
    passes = [Pass(plan, tuple(range(NUM_MICROBATCHES)), leaves)]
    signature = SimpleNamespace(num_microbatches=NUM_MICROBATCHES)
    parts, found = runs.run(Call(signature, [], {}, passes=passes, seed=7), None)
    return runs.outputs(parts, slice(None)), found[0].run


def test_a_call_adopts_parameters_puts_inputs_and_publishes_results():
    backend, runner, _ = runner_of(is_training=False)
    loss, _ = call(runner)
    assert backend.calls == ["adopt", "put", "put", *["stage 0 forward"] * 3]
    backend.calls.clear()
    assert [value.shape for value in loss.outputs] == [()] * NUM_MICROBATCHES
    assert loss.reduce_mean() == 0.0
    assert backend.calls == ["publish", "adopt"]


def test_a_training_step_reduces_and_keeps_nothing_but_what_it_counted():
    _, runner, reduction = runner_of(is_training=True)
    loss, run = call(runner)
    assert reduction.events == ["begin", ("start", 0, 4), ("finish", [0])]
    held = [*run.tensors, *run.inputs, *run.seeds, *run.accumulators, *run.results, *run.prepared]
    assert held == [] and run.objective_seeds == {} and run.values.is_empty()
    assert run.num_tasks == 2 * NUM_MICROBATCHES
    assert len(loss.outputs) == NUM_MICROBATCHES


def test_the_seed_of_gradients_is_put_once_and_zeros_that_are_donated_are_new():
    backend, runner, _ = runner_of(is_training=True)
    call(runner)
    first = backend.calls.count("put"), backend.calls.count("zeros")
    backend.calls.clear()
    call(runner)
    second = backend.calls.count("put"), backend.calls.count("zeros")
    assert (first, second) == ((3, 1), (2, 1))


def test_a_constant_that_was_written_to_and_a_new_loss_scale_are_put_again():
    backend, runner, reduction = runner_of(is_training=True)
    call(runner)
    scale = runner._read["scale"] = runner._constants.of(torch.ones(()))
    runner._constants.upload([scale])
    for changes in (False, True):
        if changes:
            scale.given.data.fill_(2.0)
            reduction.objective_scale /= 2
        backend.calls.clear()
        call(runner)
        assert backend.calls.count("put") == 2 + 2 * changes
