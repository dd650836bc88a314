"""What a rank compiles for a step, on a backend that computes nothing."""

import pytest

from mpxla.tests.device.null import NullBackend
from mpxla.tests.device.null_steps import plan_of

pytestmark = pytest.mark.unit


def names(backend):
    return [program.name for program in backend.compiled]


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_a_rank_compiles_its_own_stage_only(pp_rank):
    backend = NullBackend()
    plan = plan_of(backend, pp_rank, 2)
    assert names(backend) == [f"stage {pp_rank} forward", f"stage {pp_rank} backward"]
    assert list(plan.programs) == [pp_rank]
    assert not plan.is_random and plan.random_stages == ()


def test_programs_take_and_give_what_their_ports_say():
    backend = NullBackend()
    plan = plan_of(backend, 0, 2)
    lowered = plan.programs[0].lowered
    forward, backward = backend.compiled
    assert forward.inputs == lowered.forward_inputs
    assert [spec.shape for spec in forward.inputs] == [(6, 4), (6,), (3, 4)]
    assert forward.outputs[0].shape == (3, 6)
    assert backward.inputs == lowered.backward_inputs
    assert [spec.shape for spec in backward.outputs] == [(6, 4), (6,)]


def test_an_evaluation_has_no_backward():
    backend = NullBackend()
    plan = plan_of(backend, is_training=False)
    assert names(backend) == ["stage 0 forward"]
    assert plan.programs[0].backward is None


def test_a_schedule_with_split_backwards_compiles_both_parts():
    backend = NullBackend()
    plan_of(backend, 1, 2, pipeline="zero_bubble")
    assert names(backend) == [
        "stage 1 forward",
        "stage 1 input gradients",
        "stage 1 weight gradients",
    ]
