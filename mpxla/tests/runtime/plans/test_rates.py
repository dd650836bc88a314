"""Rates of a device: measured once, rounded, kept in a file, and those of rank 0 on all ranks."""

import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.config import Config
from mpxla.device.eager import EagerBackend
from mpxla.env import LaunchEnv
from mpxla.graph.cost import MachineModel
from mpxla.kept import open_kept
from mpxla.runtime.plans import rates
from mpxla.runtime.plans.rates import device_rates, measure_rates, rates_of_job
from mpxla.tests.device.null import NullBackend
from mpxla.tests.ranks.run import run_ranks
from mpxla.topology import Topology

FOUND = MachineModel(2.0**36, 2.0**38, 2.0**33, task_s=2.0**-18)


@pytest.fixture
def measured(monkeypatch):
    """The backends whose rates were measured; each has those of `FOUND`."""
    backends = []
    monkeypatch.setattr(rates, "measure_rates", lambda one: backends.append(one) or FOUND)
    return backends


@pytest.mark.unit
def test_programs_of_known_times_give_the_rates_without_what_starting_takes(monkeypatch):
    start_s, float_s, narrow_s, byte_s, task_s = 1e-4, 1e-11, 1e-12, 1e-10, 4e-6

    def fastest(name, function, inputs, backend):
        shape, dtype = inputs[0].shape, inputs[0].dtype
        (result,) = function(*(torch.zeros(s.shape, dtype=s.dtype) for s in inputs))
        assert (result.shape, result.dtype) == (shape, dtype)
        number = {"a product": 0, "a chain of products": 16, "a sum": 0}.get(name)
        if number is not None:
            traffic = 3 * inputs[0].num_bytes * byte_s if name == "a sum" else 0.0
            return start_s + number * task_s + traffic
        return start_s + 2 * shape[0] ** 3 * (narrow_s if dtype is torch.bfloat16 else float_s)

    monkeypatch.setattr(rates, "fastest", fastest)
    found = measure_rates(NullBackend())
    expected = MachineModel(1 / float_s, 1 / narrow_s, 1 / byte_s, task_s=task_s)
    for name, value in asdict(expected).items():
        assert math.log2(getattr(found, name) / value) == pytest.approx(0, abs=0.25), name
    halves = [2 * math.log2(getattr(found, name)) for name in rates._MEASURED]
    assert halves == [round(half) for half in halves], "two values per factor of two"


@pytest.mark.unit
def test_noise_beyond_all_a_program_takes_leaves_a_rate(monkeypatch):
    monkeypatch.setattr(rates, "fastest", lambda *_: 1e-3)
    found = measure_rates(NullBackend())
    assert all(0 < getattr(found, name) < math.inf for name in rates._MEASURED)


@pytest.mark.unit
def test_a_backend_measures_by_running_programs():
    backend = EagerBackend()
    found = measure_rates(backend)
    assert backend.num_compilations == 5
    assert 1e6 < found.memory_bytes_per_s < 1e13
    assert found.link_bytes_per_s == MachineModel().link_bytes_per_s


@pytest.mark.unit
def test_rates_are_measured_once_for_a_kind_of_device(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    assert [device_rates(session(tmp_path)) for _ in range(2)] == [FOUND, FOUND]
    assert len(measured) == 1, "the second start finds them"
    monkeypatch.setenv("NPROC", "1")
    device_rates(session(tmp_path))
    assert len(measured) == 2, "with other threads the device is another one"


@pytest.mark.unit
def test_where_nothing_can_be_kept_or_measured_a_job_goes_on(tmp_path, monkeypatch, measured):
    (tmp_path / "file").touch()
    assert device_rates(session(tmp_path / "file")) == FOUND

    def fail(backend):
        raise RuntimeError("no device")

    monkeypatch.setattr(rates, "measure_rates", fail)
    assert device_rates(session(tmp_path)) == MachineModel()


class Objects:
    """Of rank 0, or of another rank to which rank 0 has sent `FOUND`."""

    def __init__(self):
        self.events = []

    def broadcast(self, value, ranks):
        self.events.append((value, ranks))

    def recv_from(self, source):
        self.events.append(source)
        return asdict(FOUND)


def session(tmp_path, rank=0, is_host=True, **keys):
    backend = NullBackend()
    backend.is_host = is_host
    config = Config(**{"pipeline_parallel_degree": 2, **keys})
    env = LaunchEnv(rank=rank, world_size=2)
    topology = Topology(2, config.pipeline_parallel_degree, 1)
    found = SimpleNamespace(config=config, env=env, rank=rank, topology=topology, backend=backend)
    found.transport = None
    found.objects, found.kept = Objects(), open_kept(str(tmp_path), "host")
    return found


@pytest.mark.unit
@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline_parallel_degree": 1},
        {"device_rates": "constant"},
        {
            "auto_partition": False,
            "default_partition": 0,
            "set_by": {"pipeline": "init", "active_microbatches": "init"},
        },
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_chooses_nothing_measures_and_sends_nothing(tmp_path, measured, rank, keys):
    one = session(tmp_path, rank, is_host=False, **keys)
    assert rates_of_job(one) == MachineModel()
    assert not measured and not one.objects.events


@pytest.mark.unit
@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("key", ["auto", "measured"])
def test_rank_0_measures_on_accelerators_and_where_it_is_told_to(tmp_path, measured, is_host, key):
    one = session(tmp_path, is_host=is_host, device_rates=key)
    expected = MachineModel() if is_host and key == "auto" else FOUND
    assert rates_of_job(one) == expected
    assert one.objects.events == [(asdict(expected), (0, 1))]
    assert len(measured) == (expected is FOUND)


@pytest.mark.unit
def test_other_ranks_take_what_rank_0_sends(tmp_path, measured):
    one = session(tmp_path, rank=1, device_rates="measured")
    assert rates_of_job(one) == FOUND
    assert one.objects.events == [0] and not measured


def rates_in_use(key):
    """The rates by which a rank cut its step; only rank 0 can measure."""

    def measure(backend):
        assert smp.rank() == 0, "the others do not measure"
        return FOUND

    rates.measure_rates, before = measure, rates.measure_rates
    smp.init({"pipeline_parallel_degree": 2, "memory_weight": 0.2, "device_rates": key})
    try:
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))

        @smp.step
        def step(model, x):
            return model(x).sum()

        step(model, torch.ones(2, 4))
        cutter, (plan,) = model._engine._cutter, model._engine.calls.plans
        return cutter.machine, sum(plan.runner.plan.cut.problem.forward_s)
    finally:
        rates.measure_rates = before


@pytest.mark.ranks
def test_all_ranks_cut_by_the_rates_of_the_first(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    keys = "auto", "measured", "measured"
    built_in, measured, again = (run_ranks(rates_in_use, 2, key, env=env) for key in keys)
    assert [machine for machine, _ in built_in] == [MachineModel()] * 2
    link = measured[0][0].link_bytes_per_s
    assert link != MachineModel().link_bytes_per_s and 1e6 < link < 1e12
    assert [machine for machine, _ in measured] == [replace(FOUND, link_bytes_per_s=link)] * 2
    assert again == measured, "what was measured counts"
    assert measured[0][1] == measured[1][1] > built_in[0][1] == built_in[1][1]
