"""Replicas train as one process does on the union of their batches.

Each replica gets its part of every batch. Numbers of the plain model: loss, norm of the gradients
before clipping, parameters, and the state of the optimizer; with and without sharding of it,
accumulation over step calls, clipping, and another place of the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from mpxla.tests.models import Batch, subject
from mpxla.tests.parity import Plain, batch_of, build, step_plainly
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import LOSS, PARAMETER, ROUNDING, assert_close_by_norm

NUM_STEPS = 5


@dataclass(frozen=True)
class Case:
    """A way to train one subject over replicas.

    Attributes:
        subject: the model.
        replicas: how many.
        stages: of each.
        microbatches: of each.
        is_sharded: `shard_optimizer_state`.
        passes: step calls per update.
        max_norm: clips gradients, if given.
        strategy: `placement_strategy`.
    """

    subject: str
    replicas: int
    stages: int
    microbatches: int = 2
    is_sharded: bool = False
    passes: int = 1
    max_norm: float | None = None
    strategy: str = "cluster"

    @property
    def bucket_bytes(self) -> int:
        """So that every rank has several buckets."""
        return 1024 if self.subject == "mlp" else 8192

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages

    def __str__(self) -> str:
        words = [f"{self.subject}-{self.replicas}x{self.stages}", self.strategy]
        words += ["zero"] * self.is_sharded + [f"passes{self.passes}"] * (self.passes > 1)
        return "-".join(words + ["clipped"] * (self.max_norm is not None))


@dataclass
class Found:
    """What a training gives.

    Attributes:
        losses: of every step call.
        norms: of the gradients before clipping, of every update.
        state: state dict of the model.
        optimizer: state dict of the optimizer.
        state_bytes: of the optimizer's moments on one rank.
        held_bytes: of the parameters that the rank holds.
        compilations: programs compiled after the first steps.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state_bytes: int = 0
    held_bytes: int = 0
    compilations: int = 0


def groups_of(parameters: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with other settings, as scripts have for biases."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def make_optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A large eps: gradients that are rounding only must not decide."""
    return torch.optim.AdamW(groups_of(parameters), lr=0.01, eps=1e-3)


def data_of(case: Case, number: int) -> Batch:
    """The union of the replicas' batches of one step call."""
    return batch_of(subject(case.subject), number, case.microbatches * case.replicas)


def train_plainly(case: Case) -> Found:
    chosen = subject(case.subject)
    count = case.microbatches * case.replicas
    model = Plain(build(chosen), count)
    optimizer = make_optimizer(model.module.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = Found([], [], {}, {})
    for number in range(NUM_STEPS * case.passes):
        if number % case.passes == 0:
            optimizer.zero_grad()
        returned = step_plainly(chosen, model, data_of(case, number), count)
        found.losses.append(torch.stack([value["loss"] for value in returned]).mean().item())
        if number % case.passes == case.passes - 1:
            if case.max_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
                found.norms.append(norm.item())
            optimizer.step()
            scheduler.step()
    found.state = {n: v.detach().clone() for n, v in model.module.state_dict().items()}
    found.optimizer = optimizer.state_dict()
    return found


def train(case: Case) -> Found:
    """Runs on every rank."""
    import mpxla as smp
    from mpxla.session import current

    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": case.stages,
            "microbatches": case.microbatches,
            "placement_strategy": case.strategy,
            "shard_optimizer_state": case.is_sharded,
        }
    )
    chosen = subject(case.subject)
    raw = build(chosen)
    model = smp.DistributedModel(
        raw, backward_passes_per_step=case.passes, bucket_cap_mb=case.bucket_bytes / 2**20
    )
    optimizer = smp.DistributedOptimizer(make_optimizer(raw.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = smp.step(chosen.step)
    found = Found([], [], {}, {})
    for number in range(NUM_STEPS * case.passes):
        if number % case.passes == 0:
            optimizer.zero_grad()
        if number == 3 * case.passes:
            before = current().backend.num_compilations
        returned = step(model, part_of(data_of(case, number), case.replicas, smp.rdp_rank()))
        loss = returned["loss"].reduce_mean().item()
        found.losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / case.replicas)
        if number % case.passes == case.passes - 1:
            if case.max_norm is not None:
                norm = smp.clip_grad_norm_(model.parameters(), case.max_norm)
                found.norms.append(norm.item())
            optimizer.step()
            scheduler.step()
    found.compilations = current().backend.num_compilations - before
    found.state_bytes = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim() > 0  # not the number of steps
    )
    found.held_bytes = sum(parameter.nbytes for parameter in model.local_parameters())
    found.state, found.optimizer = model.state_dict(), optimizer.state_dict()
    return found


def part_of(batch: Batch, count: int, index: int) -> Batch:
    return {name: tensor.chunk(count)[index] for name, tensor in batch.items()}


def assert_parity(case: Case, observed: Sequence[Found], expected: Found) -> None:
    for rank, found in enumerate(observed):
        assert found.losses == pytest.approx(expected.losses, rel=LOSS), f"rank {rank}"
        assert found.norms == pytest.approx(expected.norms, rel=LOSS), f"rank {rank}"
        assert found.compilations == 0, "no program is new after some steps"
        for name, value in observed[0].state.items():
            assert torch.equal(found.state[name], value), f"rank {rank} has another {name}"
    assert_close_by_norm(observed[0].state, expected.state, PARAMETER, floor=ROUNDING)
    groups = observed[0].optimizer["param_groups"]
    assert [g["params"] for g in groups] == [
        g["params"] for g in expected.optimizer["param_groups"]
    ]
    assert [g["lr"] for g in groups] == [g["lr"] for g in expected.optimizer["param_groups"]]
    for position, state in expected.optimizer["state"].items():
        mine = observed[0].optimizer["state"][position]
        assert mine["step"] == state["step"]
        moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
        mine = {key: mine[key] for key in moments}
        assert_close_by_norm(mine, moments, 1e-4, floor=ROUNDING)


def assert_little_state(case: Case, observed: Sequence[Found]) -> None:
    """AdamW's two moments once per stage that holds the parameter, evenly over its replicas.

    What a rank may hold too much is the rest of one bucket.
    """
    total = sum(found.state_bytes for found in observed)
    assert total * case.replicas == 2 * sum(found.held_bytes for found in observed)
    largest = max(p.nbytes for p in build(subject(case.subject)).parameters())
    for found in observed:
        share = 2 * found.held_bytes / case.replicas
        assert found.state_bytes <= share + 2 * max(case.bucket_bytes, largest)


CASES = [
    Case("mlp", 2, 2, is_sharded=True, max_norm=0.5, strategy="spread"),
]
GRIDS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 3)]
SLOW = [
    Case("shared", 2, 2, max_norm=0.5, passes=2, microbatches=3),
    Case("gpt", 2, 2, is_sharded=True, max_norm=0.5, strategy="spread"),
    # All pairs of division, and passes with norm, on small grids and on large ones.
    Case("shared", 2, 1, passes=2),
    Case("shared", 2, 1, is_sharded=True, max_norm=0.3),
    Case("shared", 1, 2, max_norm=0.3),
    Case("gpt", 1, 2, is_sharded=True, passes=2),
    Case("gpt", 4, 1, is_sharded=True, passes=2),
    Case("mlp", 1, 4, passes=2),
    Case("mlp", 2, 3, max_norm=0.3),
]


def sweep() -> list[Any]:
    """Long: the full product of models, grids, division, and passes with norm."""
    found = []
    for name, (dp, pp), sharded, (passes, norm) in product(
        ("mlp", "gpt", "shared"), GRIDS, (False, True), ((1, 0.3), (2, None))
    ):
        case = Case(name, dp, pp, is_sharded=sharded, passes=passes, max_norm=norm)
        if case not in SLOW:
            found.append(pytest.param(case, marks=pytest.mark.long))
    return found


def check(case: Case) -> None:
    observed, expected = run_ranks(train, case.world_size, case, timeout_s=200), train_plainly(case)
    assert_parity(case, observed, expected)
    if case.is_sharded:
        assert_little_state(case, observed)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_train_as_one_process(case):
    check(case)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", [*SLOW, *sweep()], ids=str)
def test_replicas_train_as_one_process_everywhere(case):
    check(case)


@pytest.mark.slow
@pytest.mark.ranks
def test_dividing_the_updates_changes_no_bit():
    """Two replicas: sums of two terms have one order."""
    plain = Case("mlp", 2, 1)
    whole = run_ranks(train, plain.world_size, plain)
    divided = run_ranks(train, plain.world_size, replace(plain, is_sharded=True))
    assert divided[0].losses == whole[0].losses
    for name, value in whole[0].state.items():
        assert torch.equal(divided[0].state[name], value), name
