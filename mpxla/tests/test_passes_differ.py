"""Passes of one accumulation that train other parameters than the last one does."""

import pytest
import torch
from torch import nn

from mpxla.tests.ranks.run import RankError, run_ranks

pytestmark = pytest.mark.ranks


def accumulate():
    """Runs on every rank: an accumulation whose last pass trains all, and one where it does not."""
    import mpxla as smp

    smp.init({"ddp": True})
    model = smp.DistributedModel(
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), backward_passes_per_step=2
    )

    @smp.step
    def step(model, x, places):
        loss = sum(model.module[place](x).square().mean() for place in places)
        model.backward(loss)

    x = torch.ones(2, 4)
    step(model, x, (0,))
    step(model, x, (0, 1))
    model.zero_grad()
    step(model, x, (0, 1))
    step(model, x, (0,))


def test_the_last_pass_leaves_a_parameter_out():
    text = r"StepError.*does not train the parameter 1\.bias, and an earlier one did"
    with pytest.raises(RankError, match=text):
        run_ranks(accumulate, 2, env={"MPXLA_DEVICE": "pjrt"})
