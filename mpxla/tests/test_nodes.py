"""Several nodes: one torchrun per node, both on this machine's loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import torch
from torch import nn
import mpxla as smp

smp.init({"ddp": True, "pipeline_parallel_degree": 2, "placement_strategy": sys.argv[1]})
torch.manual_seed(smp.rank())
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for number in range(2):
    optimizer.zero_grad()
    train(model, torch.full((2, 4), 1.0 + number + smp.rdp_rank()))
    optimizer.step()
weights = {name: value.tolist() for name, value in model.state_dict().items()}
ranks = smp.rank(), smp.local_rank(), smp.local_size(), smp.pp_rank(), smp.rdp_rank()
everyone = smp.allgather((ranks, smp.get_pp_group(), weights), smp.WORLD)
if smp.local_rank() == 0:
    print("FOUND", json.dumps(everyone))
smp.shutdown()
"""


STAND_INS = {
    "scontrol": """#!/usr/bin/env bash
[[ "$*" == "show hostnames nodes-of-the-job" ]] || exit 1
printf '127.0.0.1\\n127.0.0.1\\n'
""",
    "srun": """#!/usr/bin/env bash
[[ "$1" == --kill-on-bad-exit=1 ]] || exit 1
shift
SLURM_NODEID=0 "$@" > "$0.0" & first=$!
SLURM_NODEID=1 "$@" > "$0.1" & second=$!
trap 'kill $first $second' TERM
wait $first || exit 1
wait $second || exit 1
cat "$0.0" "$0.1"
""",
}
"""Slurm's programs, with two nodes on this machine. Each has a file for what it prints: long lines
of two processes would be mixed in one pipe."""


def environment_of_ranks() -> dict[str, str]:
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    return environment | {"PYTHONPATH": str(REPOSITORY)}


@pytest.mark.slow
@pytest.mark.ranks
def test_the_batch_file_for_slurm_makes_one_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = environment_of_ranks()
    path = f"{tmp_path}:{Path(sys.executable).parent}:{environment['PATH']}"
    variables = {
        "PATH": path,
        "SLURM_JOB_NODELIST": "nodes-of-the-job",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    job = subprocess.run(
        ["bash", str(REPOSITORY / "examples/clusters/slurm.sbatch"), str(script), "spread"],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    lines = [x.removeprefix("FOUND") for x in job.stdout.splitlines() if x.startswith("FOUND")]
    found = list(map(json.loads, lines))
    assert len(found) == 2, "one rank per node is the first on it"
    assert found[0] == found[1]
    ranks, groups, weights = zip(*found[0], strict=True)
    local = [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    assert [tuple(rank[:3]) for rank in ranks] == local
    assert [rank[3] for rank in ranks] == [0, 0, 1, 1]
    assert sorted(map(list, {tuple(group) for group in groups})) == [[0, 2], [1, 3]]
    assert all(other == weights[0] for other in weights)
