"""How tests of wrong use start, and how they look at what every rank raises.

`refused` runs on every rank; it collects the error that the use raises there.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpxla as smp
from mpxla.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    LoweringError,
    MpxlaError,
    PartitionError,
    PeerFailure,
    RankMismatch,
    StepError,
    TopologyError,
)
from mpxla.tests.ranks.run import run_ranks

BATCH = 4
TWO = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"ddp": True, "microbatches": 2}


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def made(config=TWO, **options):
    smp.init(config)
    torch.manual_seed(0)
    return smp.DistributedModel(Net(), **options)


def batch():
    return torch.ones(BATCH, 5)


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return model(x)


def refused(use: Callable[[], Any]) -> tuple[str, str]:
    """Runs on every rank: class and text of the error that a use raises."""
    try:
        use()
    except MpxlaError as error:
        assert type(error).__module__ == "mpxla.errors"
        kind = next(k for k in type(error).__mro__ if k in _KINDS)
        return kind.__name__, str(error)
    return "nothing", "was raised"


_KINDS = (
    *(
        CaptureError,
        CheckpointError,
        ConfigError,
        LoweringError,
        PartitionError,
        PeerFailure,
        RankMismatch,
    ),
    *(StepError, TopologyError, MpxlaError),
)


def check(use, kind, pattern, world_size=2, at=None):
    """A use is refused on all ranks, or on those `at` which the text is expected."""
    results = run_ranks(refused, world_size, use)
    ranks = range(world_size) if at is None else at
    check_texts([results[rank] for rank in ranks], kind, pattern)
    return results


def check_texts(results, kind, pattern):
    """Every rank raises the error itself, and not the news of another rank's."""
    for found, text in results:
        assert found == kind.__name__, text
        assert re.search(pattern, text, re.DOTALL), text
