"""Sharded data parallelism in real processes trains as one process does.

Losses, norms of gradients before clipping, whole parameters and optimizer states after several
steps, inside pipelines and beside further replicas.
"""

import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
MICROBATCHES = 2
GRADIENTS = {"shard_gradients": True}
WIDTH, WORDS = 12, 15


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    degree: int
    stages: int = 1
    groups: int = 1
    backend: str = "pjrt"
    passes: int = 1
    checkpointed: bool = False
    keys: tuple[tuple[str, Any], ...] = ()
    hosts: int = 1
    """Over which the launcher says that ranks lie."""
    keeps_whole: bool = False
    """Whether gradients alone are divided, over all replicas."""

    def __str__(self) -> str:
        words = [f"{self.degree}x{self.stages}x{self.groups}-{self.backend}"]
        words += [f"{self.passes}passes"] * (self.passes > 1)
        words += [f"{self.hosts}hosts"] * (self.hosts > 1)
        words += ["gradients"] * self.keeps_whole
        words += ["checkpointed"] * self.checkpointed
        return "-".join(words + [f"{key}={value}" for key, value in self.keys])

    @property
    def replicas(self) -> int:
        return self.degree * self.groups

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages

    @property
    def is_by_host(self) -> bool:
        ranks = self.degree // self.hosts
        return self.hosts > 1 < ranks and ("sdp_hierarchical_allgather", False) not in self.keys

    def config(self):
        return {
            "ddp": True,
            **(GRADIENTS if self.keeps_whole else {"sharded_data_parallel_degree": self.degree}),
            **({} if self.keeps_whole else {"sdp_gradient_clipping": 0.1}),
            "sdp_param_persistence_threshold": 16,
            "pipeline_parallel_degree": self.stages,
            "microbatches": MICROBATCHES,
            "memory_weight": 0.0,
            **dict(self.keys),
        }


class Block(nn.Module):
    """Weights of 144 and 300 elements; of the biases one is divided, the norm is not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 25)
        self.down = nn.Linear(25, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head that shares its weight."""

    def __init__(self, num_blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@dataclass
class Found:
    """What a training gives."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[int, dict[str, Any]] = field(default_factory=dict)
    elements: int = 0
    compilations: int = 0
    is_by_host: bool = False


def build(seed=3):
    torch.manual_seed(seed)
    return Model()


def batch_of(number, replicas):
    """The union of the replicas' batches."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (2 * MICROBATCHES * replicas, 8), generator=generator)


def loss_of(model, ids):
    scores = model(ids)[:, :-1]
    return nn.functional.cross_entropy(scores.reshape(-1, WORDS).float(), ids[:, 1:].reshape(-1))


def make_optimizer(parameters):
    """A large eps: gradients that are rounding only must not decide."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train_plainly(case):
    found, model = Found(), build()
    optimizer = make_optimizer(model.parameters())
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = []
        for one in range(case.passes):
            parts = batch_of(number * case.passes + one, case.replicas)
            parts = parts.chunk(MICROBATCHES * case.replicas)
            losses.append(sum(loss_of(model, part) for part in parts) / len(parts))
        sum(losses).backward()
        found.losses += [loss.item() for loss in losses]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.norms.append(norm.item())
        optimizer.step()
    found.state = {name: value.clone() for name, value in model.state_dict().items()}
    found.optimizer = optimizer.state_dict()["state"]
    return found


def train(case):
    """Runs on every rank."""
    import mpxla as smp
    from mpxla.comm.by_host import GatherByHost

    rank, per_host = int(os.environ["RANK"]), case.world_size // case.hosts
    places = {"LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
    with mock.patch.dict(os.environ, places):
        smp.init(case.config())
    by_host, gather = [], GatherByHost.__call__
    counting = lambda self, *tensors: by_host.append(self) or gather(self, *tensors)  # noqa: E731
    with mock.patch.object(GatherByHost, "__call__", counting):
        found = train_in_session(case)
    found.is_by_host = bool(by_host)
    return found


def train_in_session(case):
    import mpxla as smp
    from mpxla.session import current

    raw = build(3 + smp.rdp_rank())  # replicas take over the values of the first
    model = smp.DistributedModel(raw, backward_passes_per_step=case.passes)
    for block in model.get_module().blocks if case.checkpointed else ():
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def step(model, ids):
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    found = Found()
    for number in range(NUM_STEPS):
        if number == 2:
            found.compilations = -current().backend.num_compilations
        optimizer.zero_grad()
        for one in range(case.passes):
            batch = batch_of(number * case.passes + one, case.replicas)
            returned = step(model, batch.chunk(case.replicas)[smp.rdp_rank()])
            found.losses.append(returned.reduce_mean().item())
        if case.keeps_whole:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.norms.append(float(norm if case.keeps_whole else optimizer._global_grad_norm))
    found.compilations += current().backend.num_compilations
    found.elements = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    found.state = {name: value.cpu().float() for name, value in model.state_dict().items()}
    found.optimizer = optimizer.state_dict()["state"]
    return found


CASES = (Case(2),)
SWEEP = (
    Case(2, stages=2, backend="torch_xla"),
    Case(4, hosts=2, backend="torch_xla"),
    Case(4, hosts=2, keys=(("sdp_hierarchical_allgather", False),)),
    Case(4, hosts=2, keys=(("sdp_gather", "step"),)),
    Case(3),
    Case(2, stages=2, hosts=2, keys=(("pipeline", "zero_bubble"),)),
    Case(2, keys=(("activation_memory", "recompute"),)),
    Case(2, stages=2, backend="torch_xla", checkpointed=True),
    Case(2, backend="torch_xla", keys=(("transport", "xla"),)),
    Case(2, groups=2, backend="torch_xla", passes=2, keys=(("sdp_gather", "auto"),)),
    Case(2, stages=2, passes=2, backend="torch_xla", keeps_whole=True),
    Case(3, keeps_whole=True),
    Case(2, backend="torch_xla", keys=(("transport", "xla"),), keeps_whole=True),
    pytest.param(
        Case(2, stages=2, groups=2, backend="torch_xla", passes=2), marks=pytest.mark.long
    ),
)


NARROW = (
    pytest.param(Case(2, keys=(("bf16", True),)), marks=pytest.mark.long),
    Case(2, passes=2, keys=(("fp16", True),)),
    Case(2, keys=(("bf16", True),), keeps_whole=True),
)
"""Rounded: only a wrong factor shows."""


@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_training_in_16_bits(case):
    check(case, 2e-2, 1e-1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_training_in_many_ways(case):
    check(case)


def check(case, loss=1e-5, state=1e-5):
    env = {"MPXLA_DEVICE": case.backend}
    found = run_ranks(train, case.world_size, case, timeout_s=240.0, env=env)
    expected = train_plainly(case)
    losses = torch.tensor([of_rank.losses for of_rank in found])
    torch.testing.assert_close(losses.mean(0), torch.tensor(expected.losses), rtol=loss, atol=1e-6)
    for of_rank in found:
        torch.testing.assert_close(of_rank.norms, expected.norms, rtol=10 * loss, atol=1e-6)
        assert_close_by_norm(of_rank.state, expected.state, state)
        assert of_rank.compilations == 0
        assert of_rank.is_by_host == case.is_by_host
        assert "master_param" in of_rank.optimizer[0] or not dict(case.keys).get("bf16")
        for position, entry in expected.optimizer.items():
            other = {k: v for k, v in of_rank.optimizer[position].items() if k in entry}
            assert_close_by_norm(other, entry, 10 * state)
    if case.stages == case.groups == 1:
        sizes = [p.numel() for p in build().parameters()]
        divided = sum(size for size in sizes if size >= 16)
        whole = sum(sizes) - divided
        assert sum(of_rank.elements for of_rank in found) == divided + case.degree * whole
