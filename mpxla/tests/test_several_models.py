"""Several distributed models in one session, against plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.several import SCENARIOS, run_on_rank, run_plainly

pytestmark = pytest.mark.ranks

STAGES = {"pipeline_parallel_degree": 2}
REPLICAS = {"ddp": True}
SHARDED = {"ddp": True, "shard_optimizer_state": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def compare(name, world_size, config):
    expected = run_plainly(name)
    results = run_ranks(run_on_rank, world_size, name, config)
    for rank, seen in enumerate(results):
        for key, found in seen.items():
            where = f"{key} on rank {rank}"
            if not isinstance(found, dict):
                assert found == pytest.approx(expected[key], rel=1e-4), where
                continue
            for part, value in found.items():
                wanted = expected[key][part]
                assert (value is None) == (wanted is None), f"{part}, {where}"
                if value is not None:
                    text = f"{part}, {where}: {value} instead of {wanted}"
                    torch.testing.assert_close(value, wanted, **CLOSE, msg=text)
    for key, wanted in expected.items():  # nothing is missing on all ranks
        if isinstance(wanted, dict) and key in results[0]:
            assert {part for seen in results for part in seen[key]} == set(wanted), key
    return results


def train_three():
    """Of the last model, one layer looks like a part of both others, which live on two stages."""
    smp.init(STAGES)
    torch.manual_seed(1)
    models = [
        nn.ModuleDict({"a": nn.Linear(8, 24), "b": nn.Linear(24, 8), "p": bare_linear(8)}),
        nn.ModuleDict({"q": nn.Linear(8, 8), "d": nn.Linear(8, 64), "e": nn.Linear(64, 64)}),
        nn.ModuleDict({"f": nn.Linear(8, 24), "g": nn.Linear(24, 8), "last": nn.Linear(8, 8)}),
    ]
    plain = copy.deepcopy(models)
    models = [smp.DistributedModel(model) for model in map(InOrder, models)]

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(4, 8)
    found = [step(models[place], x).reduce_mean().item() for place in (1, 0, 2)]
    return found, [InOrder(plain[place])(x).square().mean().item() for place in (1, 0, 2)]


def bare_linear(width):
    return nn.Linear(width, width, bias=False)


class InOrder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def test_a_layer_like_parts_of_two_models_that_live_apart():
    for found, expected in run_ranks(train_three, 2):
        assert found == pytest.approx(expected, rel=1e-5)


slow = pytest.mark.slow
QUICK = ("gan", "averages")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=slow) for name in SCENARIOS if name not in QUICK),
    ],
)
def test_on_two_stages(name):
    compare(name, 2, STAGES)


@slow
@pytest.mark.parametrize("name", ["gan", "one_optimizer"])
def test_over_replicas_that_divide_updates(name):
    compare(name, 2, SHARDED)


OTHERS = [
    ("shared_encoder", 1, {}),
    ("distillation", 2, REPLICAS),
    ("actor_and_critic", 4, {**STAGES, **REPLICAS}),
    ("one_optimizer", 4, {**STAGES, **SHARDED}),
    ("alternating", 4, {**STAGES, **SHARDED}),
    ("shared_encoder", 4, {**STAGES, **SHARDED}),
]
MORE = [
    ("gan", 1, {}),
    ("actor_and_critic", 2, REPLICAS),
    ("one_optimizer", 2, REPLICAS),
    ("alternating", 2, REPLICAS),
    ("distillation", 2, SHARDED),
    ("gan", 4, {**STAGES, **REPLICAS}),
    ("shared_encoder", 4, {**STAGES, **REPLICAS}),
    ("actor_and_critic", 4, {**STAGES, **SHARDED}),
]
"""Of the product of models and worlds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "config"),
    [*OTHERS, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)],
)
def test_in_other_worlds(name, world_size, config):
    compare(name, world_size, config)
