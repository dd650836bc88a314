"""A job that starts again: it finds what the first start left, and computes the same numbers."""

import os

import pytest
import torch

from mpxla import session
from mpxla.tests import parity
from mpxla.tests.ranks.run import run_ranks_unpooled
from mpxla.tests.test_parity import case_of


def start(folder, case):
    """Losses, state, and how many values were put on disk and found there."""
    os.environ["XDG_CACHE_HOME"] = folder
    observed = parity.train(case)
    kept = session.current().kept
    return observed.adam_losses, observed.state, kept.num_added, kept.num_found


MLP, GPT = case_of("mlp", "2x2I"), parity.Case("gpt", 2, 4, "zero_bubble")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "device"),
    [
        (MLP, "pjrt"),
        pytest.param(MLP, "torch_xla", marks=pytest.mark.torch_xla),
        (GPT, "pjrt"),
    ],
    ids=["mlp-pjrt", "mlp-torch_xla", "gpt-pjrt"],
)
@pytest.mark.slow
def test_it_adds_nothing_and_computes_the_same(case, device, tmp_path):
    env = {"MPXLA_DEVICE": device}
    starts = [run_ranks_unpooled(start, 2, str(tmp_path), case, env=env) for _ in range(2)]
    for rank in (rank for ranks in starts for rank in ranks):
        assert rank.exit_code == 0, rank.stderr
    first, second = ([rank.value for rank in ranks] for ranks in starts)
    for before, after in zip(first, second, strict=True):
        assert before[2] > 0 and after[2] == 0 and after[3] > 0
        assert after[0] == before[0]
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
