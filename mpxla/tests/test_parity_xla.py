"""Training over the `xla` transport: its programs, executed between processes by jaxlib."""

import json
import os
from unittest.mock import patch

import pytest
import torch

import mpxla as smp
from mpxla import connection, session
from mpxla.comm.xla import XlaTransport
from mpxla.tests import test_parity_replicas as replicas
from mpxla.tests.comm.recorder import Kind, Recorder, check
from mpxla.tests.parity import Case, train
from mpxla.tests.parity_checks import assert_parity, assert_promises
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_parity import train_plainly

pytestmark = pytest.mark.ranks


def recorded(function, *args):
    """Runs a script over `xla` on this rank -> (what it returns, what its transport did)."""
    recorders = []

    def transport(host, runner, *args, **kwargs):
        recorders.append(Recorder(runner, host.rank))
        return XlaTransport(host, recorders[0], *args, **kwargs)

    launcher = {"MPXLA_CONFIG": json.dumps({"transport": "xla"})}
    with patch.object(connection, "XlaTransport", transport), patch.dict(os.environ, launcher):
        value = function(*args)
        # Nothing waits for the last messages; behind a barrier they are in the recording.
        session.current().transport.barrier(tuple(range(smp.size()))).result()
        return value, recorders[0].events


def run(function, world_size, *args):
    results = run_ranks(recorded, world_size, function, *args, timeout_s=200)
    return [value for value, _ in results], [events for _, events in results]


@pytest.mark.parametrize(
    "case",
    [
        Case("mlp", 2, 4),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case("shared", 3, 5),
                Case("bert", 2, 3, "simple"),
            )
        ),
        pytest.param(Case("nested", 4, 6), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=str,
)
def test_pipelines_train_as_one_process(case):
    observed, recordings = run(train, case.stages, case)
    assert_parity(observed, train_plainly(case))
    assert_promises(case, observed)
    check(recordings, whole_mesh=True)
    transfers = [e for events in recordings for e in events if e.program.op == "transfer"]
    assert {e.kind for e in transfers} == {Kind.LOAD, Kind.EXECUTE}


def run_replicas(case):
    """With everything that replicas do; see `test_parity_replicas`."""
    observed, recordings = run(replicas.train, case.world_size, case)
    replicas.assert_parity(case, observed, replicas.train_plainly(case))
    check(recordings)
    return {event.program.op for events in recordings for event in events}


@pytest.mark.parametrize(
    "case",
    [
        replicas.Case("mlp", 2, 1, is_sharded=True, max_norm=0.1),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                replicas.Case("mlp", 2, 2, passes=2, max_norm=0.3),
                replicas.Case("gpt", 2, 2, is_sharded=True, max_norm=0.3, strategy="spread"),
            )
        ),
        pytest.param(
            replicas.Case("shared", 1, 3, max_norm=0.3), marks=[pytest.mark.slow, pytest.mark.long]
        ),
    ],
    ids=str,
)
def test_replicas_train_as_one_process(case):
    operations = run_replicas(case)
    assert ("reduce_scatter" in operations) == case.is_sharded
    assert ("transfer" in operations) == (case.stages > 1)
    assert case.max_norm is None or "all_gather" in operations


def train_on(values):
    """One step on each, clipped."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(3, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(model, x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    for value in values:
        optimizer.zero_grad()
        step(model, torch.full((2, 3), value))
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_rule_9_what_ranks_do_does_not_depend_on_values():
    """Zeros are what `neuron_parallel_compile` gives; not a number, what an overflow leaves."""
    values = [1.0, 2.0, 0.0, float("inf"), float("nan")]
    _, recordings = run(train_on, 2, values)
    check(recordings)
    for events in recordings:
        (bucket,) = {e.program for e in events if e.program.operands[0].shape == (8,)}
        of_steps = [(e.kind, e.program) for e in events]
        of_steps = of_steps[of_steps.index((Kind.EXECUTE, bucket)) :]
        assert of_steps.count((Kind.EXECUTE, bucket)) == len(values)
        assert Kind.LOAD not in [kind for kind, _ in of_steps]
