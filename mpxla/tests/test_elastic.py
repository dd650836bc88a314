"""A job that loses a node goes on with fewer replicas, and its losses stay those of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mpxla.comm.addresses import reserved_port

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS, BATCH, LOST_AFTER = 8, 8, 4

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
import mpxla as smp

folder, num_steps, batch_size, lost_after = Path(sys.argv[1]), *map(int, sys.argv[2:])
(folder / f"pid-{os.getppid()}-{os.getpid()}").touch()
smp.init({"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2})
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

@smp.step
def train(model, x):
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    model.backward(loss)
    return loss

first = 0
if (folder / "newest").exists():
    content = smp.resume_from_checkpoint(folder)
    scheduler.load_state_dict(content["scheduler"])
    first = content["step"]
for step in range(first, num_steps):
    # The same global batch, whatever the number of replicas; each takes its part.
    batch = torch.randn(batch_size, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = train(model, batch.chunk(smp.rdp_size())[smp.rdp_rank()]).reduce_mean().item()
    optimizer.step()
    scheduler.step()
    mean = sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()
    content = {"scheduler": scheduler.state_dict(), "step": step + 1}
    smp.save_checkpoint(
        folder, f"step{step + 1}", model=model, optimizer=optimizer, user_content=content
    )
    if smp.rank() == 0:
        with open(folder / "losses", "a") as file:
            print(json.dumps([step, smp.rdp_size(), mean]), file=file, flush=True)
    if step + 1 == lost_after and smp.rdp_size() == 2:
        smp.barrier()
        time.sleep(600)  # the test ends a launcher now
smp.shutdown()
"""


def expected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    losses = []
    for step in range(NUM_STEPS):
        batch = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def launch(script, folder, port, log):
    """A node's torchrun; one or two of them make the job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=2"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-id=elastic", "--local-addr=127.0.0.1"]
    command += ["--rdzv-conf=last_call_timeout=10,join_timeout=200"]
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    arguments = [str(folder), *map(str, (NUM_STEPS, BATCH, LOST_AFTER))]
    return subprocess.Popen(
        [*command, str(script), *arguments],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def losses_in(folder):
    path = folder / "losses"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_lost_node_leaves_a_job_with_fewer_replicas(tmp_path):
    script, folder, port = tmp_path / "train.py", tmp_path / "run", reserved_port("127.0.0.1")
    script.write_text(SCRIPT)
    folder.mkdir()
    with open(tmp_path / "log", "w+") as log:
        first = launch(script, folder, port, log)
        time.sleep(2)  # it serves the rendezvous
        second = launch(script, folder, port, log)
        try:
            deadline = time.monotonic() + 200
            while len(losses_in(folder)) < LOST_AFTER and time.monotonic() < deadline:
                ended = first.poll() is not None or second.poll() is not None
                assert not ended, (tmp_path / "log").read_text()
                time.sleep(0.2)
            lost = [int(p.name.split("-")[2]) for p in folder.glob(f"pid-{second.pid}-*")]
            assert len(lost) == 2
            for pid in (second.pid, *lost):
                os.kill(pid, signal.SIGKILL)
            first.wait(timeout=150)
        finally:
            for node in (first, second):
                if node.poll() is None:
                    node.terminate()
                node.wait(timeout=60)
        text = (tmp_path / "log").read_text()
    assert first.returncode == 0, text[-6000:]
    found = losses_in(folder)
    replicas = [2] * LOST_AFTER + [1] * (NUM_STEPS - LOST_AFTER)
    assert [row[:2] for row in found] == [[i, n] for i, n in enumerate(replicas)]
    assert [loss for *_, loss in found] == pytest.approx(expected(), rel=1e-4)
