"""One rank's actions on a backend that computes nothing: order, lifetimes, accumulators."""

import itertools

import pytest
import torch

from mpxla.errors import MpxlaError
from mpxla.runtime.executor import Executor, StepRun
from mpxla.tests.device.null import NullBackend
from mpxla.tests.device.null_steps import NUM_MICROBATCHES, plan_of, two_layers

pytestmark = pytest.mark.unit


class Link:
    """Takes note of messages; gives what a stage expects."""

    def __init__(self, backend):
        self.backend, self.sent, self.calls = backend, [], backend.calls

    def send(self, tensors, transfer, channel):
        self.calls.append(f"send {channel}")
        self.sent.append([self.backend.spec(tensor) for tensor in tensors])

    def receive(self, transfer, channel):
        self.calls.append(f"expect {channel}")

        def arrive():
            self.calls.append(f"take {channel}")
            return self.backend.put([torch.zeros(s.shape, dtype=s.dtype) for s in transfer.specs])

        return arrive


def run(backend, plan, pp_rank):
    cut = plan.cut
    names = dict(two_layers().named_parameters())
    tensors = dict(zip(names, backend.adopt(list(names.values())), strict=True))
    (seed,) = backend.put([torch.ones(())])
    step = StepRun(
        tensors={f"{name}": value for name, value in tensors.items()},
        inputs=[backend.put([torch.zeros(3, 4)]) for _ in range(NUM_MICROBATCHES)],
        seeds={},
        objective_seeds={torch.float32: seed},
        zeros=backend.zeros,
    )
    leaves = {s.index: {p.name: p.leaf for p in s.inputs if p.source is None} for s in cut.stages}
    link, reduced = Link(backend), []
    edges = cut.forward, cut.backward
    executor = Executor(
        plan.programs, *edges, link, lambda s, _: reduced.append(s), leaves, backend
    )
    backend.calls.clear()
    executor.run(plan.schedule[pp_rank], step)
    return step, link, reduced, [name for name in backend.calls if name not in ("put", "zeros")]


def test_a_single_stage_runs_forward_and_backward_in_turn():
    backend = NullBackend()
    plan = plan_of(backend)
    step, link, reduced, calls = run(backend, plan, 0)
    assert sorted(calls) == ["stage 0 backward"] * 3 + ["stage 0 forward"] * 3
    assert calls[0] == "stage 0 forward" and calls[-1] == "stage 0 backward"
    assert reduced == [0] and not link.sent
    assert step.values.is_empty(), "what a backward has read is not kept"
    assert {source.source for source in step.accumulators[0]} == {"stage 0 backward"}
    assert sorted(step.results) == [(0, mb) for mb in range(NUM_MICROBATCHES)]


def test_accumulators_go_from_backward_to_backward():
    backend = NullBackend()
    plan = plan_of(backend)
    program, taken = plan.programs[0].backward, []
    count = plan.programs[0].lowered.num_accumulators
    call = type(program).__call__

    class Watched(type(program)):
        def __call__(self, arguments, seed=None):
            results = call(self, arguments, seed)
            taken.append((list(arguments[:count]), results[:count]))
            return results

    program.__class__ = Watched
    run(backend, plan, 0)
    assert [a.source for a in taken[0][0]] == ["zeros"] * count
    assert all(a.is_donated for given, _ in taken for a in given), "no old and new sums together"
    for (_, given), (next_taken, _) in itertools.pairwise(taken):
        assert next_taken == given
    assert len(taken) == NUM_MICROBATCHES


def test_the_first_of_two_stages_sends_activations_and_takes_gradients():
    backend = NullBackend()
    plan = plan_of(backend, 0, 2)
    step, link, _, calls = run(backend, plan, 0)
    assert calls.count("send forward") == calls.count("take backward") == NUM_MICROBATCHES
    assert calls.index("stage 0 forward") < calls.index("send forward")
    assert calls.index("take backward") < calls.index("stage 0 backward")
    assert all([spec.shape for spec in specs] == [(3, 6)] for specs in link.sent)
    assert not step.results and step.values.is_empty()


def test_the_last_stage_keeps_no_more_microbatches_than_its_schedule_says():
    backend = NullBackend()
    plan = plan_of(backend, 1, 2, pipeline="interleaved")
    step, _, reduced, calls = run(backend, plan, 1)
    assert dict(step.values.peak_in_flight) == {1: 1}
    assert reduced == [1] and calls.count("send backward") == NUM_MICROBATCHES


def test_an_evaluation_saves_nothing():
    backend = NullBackend()
    step, _, _, calls = run(backend, plan_of(backend, is_training=False), 0)
    assert calls == ["stage 0 forward"] * NUM_MICROBATCHES
    assert not step.values.peak_in_flight and not step.accumulators


def test_an_error_names_the_action():
    backend = NullBackend()
    plan = plan_of(backend)
    plan.programs[0].backward.inputs = ()
    with pytest.raises(MpxlaError, match="stage 0 backward takes") as caught:
        run(backend, plan, 0)
    assert "while running 0B0 (backward of stage 0, microbatch 0)" in caught.value.__notes__[0]


@pytest.mark.parametrize(("pp_rank", "which"), [(0, "backward"), (1, "forward")])
def test_what_a_rank_waits_for_is_rehearsed_on_zeros(pp_rank, which):
    plain, late = NullBackend(), NullBackend()
    late.builds_late = True
    runs = [run(b, plan_of(b, pp_rank, 2), pp_rank) for b in (plain, late)]
    (step, link, reduced, calls), (rehearsed, other_link, other_reduced, other) = runs
    name = f"stage {pp_rank} {which}"
    assert other.count(name) == NUM_MICROBATCHES + 1
    assert other.index(name) < other.index(f"take {which}")
    other.remove(name)
    assert other == calls and other_reduced == reduced
    assert rehearsed.values.is_empty() and rehearsed.num_tasks == step.num_tasks
    assert dict(rehearsed.values.peak_in_flight) == dict(step.values.peak_in_flight)
    assert other_link.sent == link.sent and rehearsed.results.keys() == step.results.keys()
