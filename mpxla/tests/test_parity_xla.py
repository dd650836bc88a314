"""Training over the `xla` transport: its programs, executed between processes by jaxlib."""

import functools
import json
import os
from unittest.mock import patch

import pytest
import torch

import mpxla as smp
from mpxla import session
from mpxla.comm.recorder import Kind, Recorder, check
from mpxla.comm.xla import XlaTransport
from mpxla.testing import run_ranks
from mpxla.tests.models import subject
from mpxla.tests.parity import NUM_STEPS, Case, Plain, batch_of, build, step_plainly, train
from mpxla.tests.parity_checks import assert_parity, assert_promises, merge
from mpxla.tests.test_parity import train_plainly
from mpxla.tests.tolerances import LOSS, PARAMETER, ROUNDING, assert_close_by_norm

pytestmark = pytest.mark.ranks


def recorded(function, *args):
    """Runs a script over `xla` on this rank -> (what it returns, what its transport did)."""
    recorder = Recorder()
    transport = functools.partial(XlaTransport, recorder=recorder)
    launcher = {"MPXLA_CONFIG": json.dumps({"transport": "xla"})}
    with patch.object(session, "XlaTransport", transport), patch.dict(os.environ, launcher):
        value = function(*args)
        # Nothing waits for the last messages; behind a barrier they are in the recording.
        session.current().transport.barrier(tuple(range(smp.size()))).result()
        return value, recorder.events


def run(function, world_size, *args):
    results = run_ranks(recorded, world_size, function, *args, timeout_s=200)
    return [value for value, _ in results], [events for _, events in results]


@pytest.mark.parametrize(
    "case",
    [
        Case("mlp", 2, 4),
        Case("shared", 3, 5),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case("gpt", 2, 4),
                Case("bert", 2, 3, "simple"),
                Case("unet", 3, 2, "simple"),
                Case("nested", 4, 6),
                Case("mlp", 4, 4, "simple"),
            )
        ),
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


def train_replica(case, dp):
    """Trains on this replica's part of every batch."""
    smp.init(
        {"pipeline_parallel_degree": case.stages, "microbatches": case.microbatches, "ddp": True}
    )
    chosen = subject(case.subject)
    model = smp.DistributedModel(build(chosen))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=chosen.learning_rate)
    )
    step, losses = smp.step(chosen.step), []
    for number in range(NUM_STEPS):
        batch = batch_of(chosen, number, case.microbatches * dp)
        part = {name: value.chunk(dp)[smp.dp_rank()] for name, value in batch.items()}
        optimizer.zero_grad()
        losses.append(step(model, part)["loss"].reduce_mean().item())
        optimizer.step()
    state = {n: v.cpu() for n, v in model.local_state_dict().items() if torch.is_tensor(v)}
    return losses, state


def train_union(case, dp):
    """The same in one process, on whole batches."""
    chosen, count, losses = subject(case.subject), case.microbatches * dp, []
    model = Plain(build(chosen), count)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        returned = step_plainly(chosen, model, batch_of(chosen, number, count), count)
        losses.append(torch.stack([value["loss"] for value in returned]).mean().item())
        optimizer.step()
    return losses, {n: v.detach().clone() for n, v in model.module.state_dict().items()}


@pytest.mark.parametrize(
    ("dp", "stages"), [(2, 1), (2, 2), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_replicas_train_as_one_process(dp, stages):
    case = Case("mlp", stages, 2)
    results, recordings = run(train_replica, dp * stages, case, dp)
    losses, state = train_union(case, dp)
    means = torch.tensor([found for found, _ in results]).mean(0).tolist()
    assert means == pytest.approx(losses, rel=LOSS)
    merged = merge([found for _, found in results])
    assert_close_by_norm(merged, state, PARAMETER, floor=ROUNDING)
    check(recordings)
    assert {"all_reduce"} <= {e.program.op for events in recordings for e in events}
