"""The benchmark of zero-bubble schedules: a device of a given speed, and what is reported."""

import types
from inspect import signature

import pytest
import torch
from torch import fx

from mpxla.device.backend import Backend
from mpxla.device.eager import EagerBackend
from mpxla.stage.spec import TensorSpec

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(benchmark_module, monkeypatch):
    """A clock that moves when somebody sleeps, and by hand."""
    clock = types.SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)

    def sleep(seconds):
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr(benchmark_module("paced"), "time", clock)
    return clock


def product(a, b):
    return [torch.ops.aten.mm.default(a, b)]


SPECS = [TensorSpec((2, 3), torch.float32), TensorSpec((3, 5), torch.float32)]


def device_and_program(paced):
    """60 operations at 20 per second, and its arguments."""
    device = paced.PacedBackend(EagerBackend(), flops_per_s=20.0)
    program = device.compile("stage 0 forward", fx.symbolic_trace(product), SPECS)
    return device, program, [torch.ones(2, 3), torch.ones(3, 5)]


def test_a_program_takes_its_operations_on_the_device_not_in_the_call(benchmark_module, clock):
    device, program, arguments = device_and_program(benchmark_module("paced"))
    assert device.seconds == {"stage 0 forward": 3.0}
    assert device.name == "paced eager", "another backend would lower stages otherwise"
    (first,), (second,) = program(arguments), program(arguments)
    assert clock.now == 100.0 and not device.is_ready(first)
    assert device.view(first).tolist() == [[3.0] * 5] * 2 and clock.now == 103.0
    assert device.is_ready(first) and not device.is_ready(second)
    clock.now = 104.0
    (third,) = program(arguments)
    device.get([first, second])
    assert clock.now == 106.0, "programs run one after the other"
    device.publish([third])
    assert clock.now == 109.0
    clock.now = 120.0
    program(arguments)
    device.wait()
    assert clock.now == 123.0, "the device was idle until the program was started"


def test_what_no_program_gave_is_ready(benchmark_module, clock):
    device, program, arguments = device_and_program(benchmark_module("paced"))
    program(arguments)
    assert device.is_ready(device.put([torch.ones(1)])[0]) and clock.now == 100.0


def seconds_of(ranks, backward, first_input):
    found = {}
    for stage in range(ranks):
        found[f"stage {stage} forward"] = 1.0
        if backward:
            found[f"stage {stage} backward"] = 2.0
            continue
        inputs = first_input if stage == 0 else 1.0
        if inputs:
            found[f"stage {stage} input gradients"] = inputs
        found[f"stage {stage} weight gradients"] = 2.0 - inputs
    return found


def test_the_simulator_is_told_what_programs_take(benchmark_module):
    simulated_s = benchmark_module("zero_bubble").simulated_s
    assert simulated_s("interleaved", 4, 4, seconds_of(4, True, 0.0)) == 21.0
    assert simulated_s("zero_bubble", 4, 4, seconds_of(4, False, 1.0)) == 15.0
    assert simulated_s("zero_bubble", 4, 4, seconds_of(4, False, 0.0)) == 15.0


def test_the_share_of_the_predicted_gain_is_of_ratios_in_turns(benchmark_module):
    zero_bubble = benchmark_module("zero_bubble")
    found = {
        "interleaved": zero_bubble.Found([20.0, 40.0, 30.0], seconds_of(4, True, 0.0), 2.5),
        "zero_bubble": zero_bubble.Found([15.0, 36.0, 24.0], seconds_of(4, False, 1.0), 2.5),
    }
    *_, first, second = zero_bubble.rows_of(found, 4, 4)
    assert first.startswith("| `interleaved` | 30.000 (20.000 - 40.000) | 1.000")
    assert "| 21.000 | 1.000 |  | 2.500000 |" in first
    assert "| 0.800 (0.750 - 0.900) | 15.000 | 0.714 | 0.70 (0.35 - 0.88) |" in second


def test_nothing_is_predicted_where_nothing_is_paced(benchmark_module):
    zero_bubble = benchmark_module("zero_bubble")
    found = {name: zero_bubble.Found([2.0], {}, 2.5) for name in ("interleaved", "zero_bubble")}
    assert zero_bubble.rows_of(found, 4, 4)[-1].endswith(
        "| 1.000 (1.000 - 1.000) |  |  |  | 2.500000 |"
    )


def test_the_paced_device_takes_what_backends_take(benchmark_module):
    paced = benchmark_module("paced").PacedBackend
    replaced = [name for name in vars(paced) if not name.startswith("_") and hasattr(Backend, name)]
    assert "publish" in replaced
    for name in replaced:
        own, others = (list(signature(getattr(k, name)).parameters) for k in (paced, Backend))
        assert name == "compile" or own == others, name
