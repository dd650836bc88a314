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


class Shared(nn.Module):
    """Calls one layer several times, so that several stages may have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.shared, self.between = (nn.Linear(8, 8) for _ in range(3))
        self.leave = nn.Linear(8, 1)

    def forward(self, x, is_shared=True):
        h = torch.tanh(self.enter(x))
        if not is_shared:
            return self.leave(h + self.between(h) * 0.2).square().mean()
        h = h + torch.tanh(self.shared(h)) + torch.tanh(self.shared(h * 0.5))
        return self.leave(h + self.between(self.shared(h)) * 0.2).square().mean()


def once(model, x):
    return model(x)


def without(model, x):
    """Skips the shared layer."""
    return model(x, is_shared=False)


def twice(model, x):
    return model(x) + 0.5 * model(x * 0.8 + 0.1)


def accumulate_over_stages(functions, keys):
    """Runs on every rank: by name, how far gradients are from those of plain PyTorch.

    Every two calls are reduced together, and nothing clears gradients between.
    """
    import mpxla as smp

    smp.init({"microbatches": 2, "ddp": True, "pipeline_parallel_degree": 2, **keys})
    model = smp.DistributedModel(Shared().double(), backward_passes_per_step=2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    def step_of(function):
        @smp.step
        def step(model, x):
            model.backward(function(model, x))

        return step

    steps = {function: step_of(function) for function in set(functions)}
    plain = Shared().double()
    for number, function in enumerate(functions):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        for part in x.chunk(4):
            (function(plain, part) / 4).backward()
        steps[function](model, x.chunk(2)[smp.rdp_rank()])
    optimizer.step()
    trained = model.state_dict()
    return {
        name: float((p.detach() - p.grad - trained[name]).norm() / p.grad.norm())
        for name, p in plain.named_parameters()
    }


DIVIDED = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}


@pytest.mark.parametrize(
    ("functions", "keys"),
    [
        ((once, twice), {}),
        ((twice, once, once, twice), {}),
        ((twice, once), {"shard_optimizer_state": True}),
        ((once, twice), {"shard_gradients": True, "sdp_param_persistence_threshold": 0}),
        ((twice, once), DIVIDED),
    ],
    ids=["whole", "not-cleared", "state", "gradients", "parameters"],
)
def test_stages_of_passes_share_other_layers(functions, keys):
    """A rank may train its copy of a layer in one pass, and leave that to another in the next."""
    for far in run_ranks(accumulate_over_stages, 4, functions, keys, env={"MPXLA_EAGER": "1"}):
        assert max(far.values()) < 1e-9, far


def test_the_last_pass_leaves_a_shared_layer_out():
    """Its gradient would be divided over replicas already, but not added up over stages."""
    keys = {"shard_gradients": True, "sdp_param_persistence_threshold": 0}
    with pytest.raises(RankError, match=r"StepError.*does not train the parameter"):
        run_ranks(accumulate_over_stages, 4, (once, without), keys, env={"MPXLA_EAGER": "1"})
