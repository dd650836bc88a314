"""Partition decisions of running jobs: kept in a file, and made from measured times."""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.config import Config
from mpxla.errors import MpxlaError, PartitionError
from mpxla.runtime.plans import cutting
from mpxla.tests.models import classify, labelled, mlp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def train_with(keys, changed=False):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **keys})
    torch.manual_seed(3)
    net = nn.Sequential(mlp(), nn.Linear(5, 5)) if changed else mlp()
    model = smp.DistributedModel(net)
    try:
        loss = smp.step(classify)(model, labelled((12,), 4))["loss"].reduce_mean().item()
    except MpxlaError as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    cut = model._engine.first_cuts[model.label]
    return loss, cut.partition.stage, sorted(name for name, _ in model.local_named_parameters())


def test_a_decision_is_written_and_followed(tmp_path):
    file = tmp_path / "cuts.json"
    keys = {"partition_file": str(file), "memory_weight": 0.9}
    written = run_ranks(train_with, 2, keys, timeout_s=120)
    data = json.loads(file.read_text())
    assert data["num_ranks"] == 2 and data["version"] == 1
    assert data["settings"]["memory_weight"] == 0.9
    assert data["settings"]["pipeline"] == "interleaved"
    # Move the second half's first operation: the file decides, not the costs.
    stages = [entry["stages"] for entry in data["nodes"]]
    moved = next(i for i, own in enumerate(stages) if own == [1])
    name = data["nodes"][moved]["name"]
    others = [i for i, entry in enumerate(data["nodes"]) if entry["stages"] == [1]]
    assert len(others) > 1
    data["nodes"][moved]["stages"] = [0]
    for entry in data["parameters"].values():
        entry["ranks"] = [0, 1]
    file.write_text(json.dumps(data))
    followed = run_ranks(train_with, 2, keys | {"load_partition": True}, timeout_s=120)
    for (loss, stage, _), (other_loss, other_stage, _) in zip(written, followed, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert [i for i, (a, b) in enumerate(zip(stage, other_stage, strict=True)) if a != b] == [
            moved
        ], name
    assert json.loads(file.read_text()) == data, "a loaded decision is not written"


def test_a_decision_for_another_model_is_refused_everywhere(tmp_path):
    file = tmp_path / "cuts.json"
    keys = {"partition_file": str(file)}
    run_ranks(train_with, 2, keys, timeout_s=120)
    results = run_ranks(train_with, 2, keys | {"load_partition": True}, True, timeout_s=120)
    texts = [text for _, text, _ in results]
    assert any("The saved partition does not fit: operation" in text for text in texts)
    assert all("Delete the partition file" in text for text in texts)


@pytest.mark.unit
def test_files_that_cannot_be_used_and_other_settings(tmp_path, caplog):
    from mpxla.graph.cost import PartitionProblem
    from mpxla.runtime.plans.partition_store import read_decision, write_decision

    problem = PartitionProblem((), {}, (), (), (), ())
    absent = Config(load_partition=True, partition_file=str(tmp_path / "absent.json"))
    with pytest.raises(
        PartitionError, match=r"cannot be read on this rank: No such file .* Run on"
    ):
        read_decision(absent, problem)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PartitionError, match=r"is not JSON .* Run once with load_partition: False"):
        read_decision(Config(load_partition=True, partition_file=str(broken)), problem)
    broken.write_text("{}")
    with pytest.raises(PartitionError, match="This is not a saved partition") as error:
        read_decision(Config(load_partition=True, partition_file=str(broken)), problem)
    assert f"while loading {broken}" in error.value.__notes__[0]
    other = {"version": 1, "num_ranks": 3, "placement": [0], "objective": 0, "nodes": []}
    broken.write_text(json.dumps(other | {"parameters": {}}))
    with pytest.raises(
        PartitionError, match="was written for pipeline_parallel_degree 3, and this"
    ):
        read_decision(Config(load_partition=True, partition_file=str(broken)), problem)
    written = other | {"num_ranks": 1, "parameters": {}, "settings": {"microbatches": 4}}
    broken.write_text(json.dumps(written))
    caplog.clear()
    read_decision(Config(load_partition=True, partition_file=str(broken)), problem)
    assert "decided under other settings (microbatches was 4 and is 1)" in caplog.text
    nowhere = Config(partition_file=str(tmp_path / "no" / "cuts.json"))
    partition = read_decision.__globals__["load_partition"](other | {"parameters": {}}, ())
    with pytest.raises(PartitionError, match=r"cannot be written: No such file .* Choose a file"):
        write_decision(nowhere, problem, partition)


class Uneven(nn.Module):
    """Operation counts say nothing about exponentials and cumulative products."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 64)
        self.leave = nn.Linear(64, 5)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for _ in range(3):
            x = torch.cumsum(torch.sort(x, dim=0).values, dim=0) * 0.1
        return self.leave(x)


def partition_by_time(measures):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "memory_weight": 0.0})
    torch.manual_seed(1)
    model = smp.DistributedModel(Uneven(), trace_execution_times=measures)
    smp.step(classify)(model, labelled((64,), 2048))
    cut = model._engine.first_cuts[model.label]
    times = {n.name: s for n, s in zip(cut.problem.nodes, cut.problem.forward_s, strict=True)}
    return times, cut.partition.stage


@pytest.mark.slow
def test_measured_times_replace_estimates():
    estimated = run_ranks(partition_by_time, 2, False, timeout_s=120)
    measured = run_ranks(partition_by_time, 2, True, timeout_s=120)
    assert measured[0] == measured[1], "both ranks cut by the same times"
    guessed, known = estimated[0][0], measured[0][0]
    assert guessed.keys() == known.keys()
    sorts = [name for name in known if name.startswith("sort")]
    assert len(sorts) == 3
    assert len({known[name] for name in sorts}) == 1, "equal operators are timed once"
    assert known[sorts[0]] > 5 * guessed[sorts[0]], "sorting takes longer than moving its bytes"


def partition_by_own_times():
    """Runs on every rank: the stages, where other operators seem slow to each tp_rank."""

    def measured(step, *_):
        names = [node.name for node in step.graph.nodes if node.op == "call_function"]
        slow = names[:4] if smp.tp_rank() == 0 else names[-4:]
        return {name: 1.0 if name in slow else 1e-6 for name in names}

    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    smp.init({**degrees, "ddp": True, "microbatches": 2, "compile_cache": ""})
    torch.manual_seed(1)
    model = smp.DistributedModel(Uneven())
    with (
        mock.patch.object(cutting, "measure_operators", measured),
        mock.patch.object(cutting, "is_worth_choosing", lambda *_: True),
    ):
        smp.step(classify)(model, labelled((64,), 8))
    return model._engine.first_cuts[model.label].partition.stage


def test_ranks_that_share_tensors_cut_by_one_measurement():
    first, *others = run_ranks(partition_by_own_times, 4, timeout_s=120)
    assert others == [first] * 3


def test_loss_is_the_plain_one():
    torch.manual_seed(3)
    net = mlp()
    batch = labelled((12,), 4)
    expected = F.cross_entropy(net(batch["x"]), batch["y"]).item()
    assert run_ranks(train_with, 2, {}, timeout_s=120)[0][0] == pytest.approx(expected, rel=1e-5)
