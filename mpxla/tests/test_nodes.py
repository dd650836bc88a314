"""Several nodes: one torchrun per node, both on this machine's loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpxla.comm.addresses import reserved_port

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
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
trap 'kill $first $second' TERM
wait $first || exit 1
wait $second
""",
}
"""Slurm's programs, with two nodes on this machine."""


def environment_of_ranks() -> dict[str, str]:
    environment = {"MPXLA_DEVICE": "pjrt", **os.environ, "OMP_NUM_THREADS": "1"}
    return environment | {"PYTHONPATH": str(REPOSITORY)}


def launch(script: Path, port: int, node: int, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}"]
    command += ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return subprocess.Popen(
        [*command, str(script), *arguments],
        env=environment_of_ranks(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "pipelines", "pp_ranks"),
    [
        ("cluster", [[0, 1], [2, 3]], [0, 1, 0, 1]),
        ("spread", [[0, 2], [1, 3]], [0, 0, 1, 1]),
    ],
)
def test_two_launchers_make_one_job(tmp_path, strategy, pipelines, pp_ranks):
    script, port = tmp_path / "script.py", reserved_port("127.0.0.1")
    script.write_text(SCRIPT)
    nodes = [launch(script, port, node, strategy) for node in range(2)]
    try:
        outputs = [node.communicate(timeout=140) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun ends its ranks on this signal
            node.wait()
    for node, (_, errors) in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, errors[-4000:]
    found = [
        json.loads(line.removeprefix("FOUND"))
        for output, _ in outputs
        for line in output.splitlines()
        if line.startswith("FOUND")
    ]
    assert len(found) == 2, "one rank per node is the first on it"
    assert found[0] == found[1]
    ranks, groups, weights = zip(*found[0], strict=True)
    local = [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    assert [tuple(rank[:3]) for rank in ranks] == local
    assert [rank[3] for rank in ranks] == pp_ranks
    assert sorted(map(list, {tuple(group) for group in groups})) == pipelines
    assert all(other == weights[0] for other in weights)


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
    first, second = map(json.loads, lines)
    assert first == second
    assert [ranks[:3] for ranks, _, _ in first] == [[0, 0, 2], [1, 1, 2], [2, 0, 2], [3, 1, 2]]
