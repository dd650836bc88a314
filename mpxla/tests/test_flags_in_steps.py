"""Training by step functions that leave `requires_grad` of parameters changed.

What one microbatch does is tested without ranks (`graph/capture/test_flags.py`), and the training
of two models in `test_several_models.py`.
"""

import pytest
import torch
from torch import nn

from mpxla.tests.clients import merged, trained, trained_plainly
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.several import Critic, Generator

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Thawing(nn.Module):
    """Is frozen but for its last layer, and thaws the one before it when it comes to that."""

    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.way, self.count, self.is_thawed = way, 0, False
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, x):
        if self.way == "counter":
            self.count += 1
            if self.count == 3:
                self.second.requires_grad_(True)
        elif self.way == "flag":
            if not self.is_thawed:
                self.second.requires_grad_(True)
                self.is_thawed = True
        elif self.way == "always":
            self.second.requires_grad_(True)
        x = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        if self.way == "afterwards" and not self.second.weight.requires_grad:
            self.second.requires_grad_(True)
        return x


def built(way):
    torch.manual_seed(2)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(5)]
    return Thawing(way), batches


def flags_of(model):
    return [parameter.requires_grad for parameter in model.parameters()]


def trained_on_ranks(way, microbatches):
    keys = {"pipeline_parallel_degree": 2, "microbatches": microbatches}
    return trained(keys, *built(way), flags_of)


@pytest.mark.parametrize(
    ("way", "microbatches"), [("counter", 1), ("flag", 1), ("afterwards", 1), ("always", 2)]
)
def test_layers_thaw_as_in_pytorch(way, microbatches):
    losses, state, flags = trained_plainly(*built(way), microbatches, look=flags_of)
    for found in run_ranks(trained_on_ranks, 2, way, microbatches):
        torch.testing.assert_close(found[:2], (losses, state), rtol=1e-4, atol=1e-6)
        assert found[2] == flags
    assert flags[-1] == [False, False, True, True, True, True]


def refused(way):
    with pytest.raises(Exception) as error:
        trained_on_ranks(way, 2)
    return str(error.value)


@pytest.mark.parametrize("way", ["counter", "flag", "afterwards"])
def test_flags_that_matter_to_the_next_microbatch_are_refused(way):
    for text in run_ranks(refused, 2, way):
        assert "microbatch 1 begins with other requires_grad of parameters" in text
        assert "second.weight" in text or "second.bias" in text


def others_on_one_rank():
    import mpxla as smp

    smp.init({"microbatches": 1, "pipeline_parallel_degree": 2})
    torch.manual_seed(1)
    g = smp.DistributedModel(Generator())
    own = [*g.parameters()][smp.rank() :]

    @smp.step
    def step(z):
        for parameter in own:
            parameter.requires_grad_(False)
        for parameter in own:
            parameter.requires_grad_(True)
        loss = g(z).square().mean()
        g.backward(loss)

    with pytest.raises(smp.MpxlaError) as error:
        step(torch.randn(8, 4))
    return str(error.value)


def test_all_ranks_change_the_same_flags():
    for text in run_ranks(others_on_one_rank, 2):
        assert "captured another step" in text


def judged(thaws, key):
    """Losses, norms and the critic's parameters on this rank.

    The critic, which has masters, is frozen outside of the step and trained in it; or it is not
    frozen, and the generator's loss sees copies of its parameters.
    """
    import mpxla as smp

    smp.init({"microbatches": 2, "pipeline_parallel_degree": 2, key: True})
    torch.manual_seed(3)
    g, d = smp.DistributedModel(Generator()), smp.DistributedModel(Critic())
    d.requires_grad_(not thaws)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(d.parameters(), 0.01))
    numbers = []

    @smp.step
    def step(z, x):
        fake = g(z)
        if thaws:
            d.requires_grad_(True)
        loss = d(fake.detach()).square().mean() + (d(x) - 1).square().mean()
        d.backward(loss)
        d.requires_grad_(False)
        g.backward(d(fake).square().mean())
        d.requires_grad_(not thaws)
        return loss

    for _ in range(3):
        z, x = torch.randn(8, 4), torch.randn(8, 3)
        optimizer.zero_grad()
        numbers.append(step(z, x).reduce_mean().item())
        numbers.append(torch.nn.utils.clip_grad_norm_(d.parameters(), 0.05).item())
        optimizer.step()
    return numbers, {n: p.detach().cpu() for n, p in d.local_named_parameters()}


@pytest.mark.parametrize("key", ["bf16", "fp16", "shard_optimizer_state"])
def test_what_is_frozen_between_steps_is_updated(key):
    found, wanted = (run_ranks(judged, 2, thaws, key) for thaws in (True, False))
    assert [numbers for numbers, _ in found] == [numbers for numbers, _ in wanted]
    parameters = [merged([part for _, part in ranks]) for ranks in (found, wanted)]
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
