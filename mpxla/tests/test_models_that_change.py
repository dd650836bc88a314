"""Models that change between steps train as in plain PyTorch: masks, norms, heads, layers.

What a change adds is placed by the next step; optimizers are those that scripts make for it.
"""

import re

import pytest
import torch
from torch import nn, optim
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import mpxla as smp
from mpxla.errors import CaptureError, RankMismatch
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_training_habits import (
    RankRun,
    check_against_plain,
    in_two_worlds,
    train_in_all_ways,
    train_step,
)
from mpxla.tests.wrong_uses import REPLICAS, TWO, check_texts, made, refused, train
from mpxla.tests.wrong_uses import batch as ones

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:.*_norm.*:FutureWarning")]


def training(run, numbers, before=lambda: None):
    """Some steps with a new optimizer, which is returned."""
    optimizer = run.wrapped(optim.AdamW(run.model.parameters(), 0.01, eps=1e-3))
    run.loop(optimizer, numbers, before)
    return optimizer


def pruning(run):
    """Again and again: the second mask comes of what the last forward has left in `left.weight`."""
    optimizer = training(run, range(2))
    for layer in (run.raw.left, run.raw.last):
        prune.l1_unstructured(layer, "weight", 0.5)
    run.loop(optimizer, range(2, 4))
    prune.l1_unstructured(run.raw.left, "weight", 0.3)
    run.loop(optimizer, range(4, 6))
    prune.remove(run.raw.left, "weight")
    run.loop(optimizer, range(6, 8))
    prune.remove(run.raw.last, "weight")


def pruning_before_the_first_step(run):
    prune.ln_structured(run.raw.left, "weight", 0.5, 2, 0)
    optimizer = training(run, range(2))
    prune.remove(run.raw.left, "weight")
    run.loop(optimizer, range(2, 4))


def weight_norm_for_a_while(run):
    training(run, range(2))
    parametrizations.weight_norm(run.raw.left)
    training(run, range(2, 4))
    parametrize.remove_parametrizations(run.raw.left, "weight")
    training(run, range(4, 6))


def start_from_the_host(*vectors):
    """Devices draw numbers of their own."""
    torch.manual_seed(9)
    for vector in vectors:
        vector.copy_(nn.functional.normalize(torch.randn(vector.shape), dim=0))


def spectral_norm_for_a_while(run):
    training(run, range(2))
    parametrizations.spectral_norm(run.raw.left)
    norm = run.raw.left.parametrizations.weight[0]
    start_from_the_host(norm._u, norm._v)
    training(run, range(2, 4))
    parametrize.remove_parametrizations(run.raw.left, "weight")
    training(run, range(4, 6))


def norms_of_old(run):
    utils.weight_norm(run.raw.left)
    utils.spectral_norm(run.raw.right)
    start_from_the_host(run.raw.right.weight_u, run.raw.right.weight_v)
    training(run, range(2))
    utils.remove_weight_norm(run.raw.left)
    utils.remove_spectral_norm(run.raw.right)
    training(run, range(2, 4))


def head(run, number=1, width=3):
    torch.manual_seed(number + run.seed)
    return nn.Linear(8, width)


def another_head(run):
    training(run, range(2))
    run.raw.last = head(run, width=4)
    parameters = run.model.parameters
    training(run, range(2, 4), lambda: utils.clip_grad_norm_(parameters(), 0.3))


def another_head_at_once(run):
    run.raw.last = head(run)
    training(run, range(2))


def a_head_in_a_new_group(run):
    optimizer = training(run, range(2))
    run.raw.last = head(run)
    optimizer.add_param_group({"params": list(run.raw.last.parameters()), "lr": 0.02})
    run.loop(optimizer, range(2, 4))


def heads_in_turns(run):
    optimizers, heads = [], [run.raw.last, head(run)]
    for number, one in enumerate([0, 1, 0, 1]):
        run.raw.last = heads[one]
        if number < 2:
            optimizers.append(run.wrapped(optim.SGD(run.model.parameters(), 0.1, 0.9)))
        run.loop(optimizers[one], [number])
    run.wrapped(optim.SGD(run.model.parameters(), 0.1))


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return self.inner(x) + self.up(torch.tanh(self.down(x)))


def adapters(run):
    training(run, range(2))
    torch.manual_seed(run.seed)
    run.raw.left, run.raw.right = Adapter(run.raw.left), Adapter(run.raw.right)
    training(run, range(2, 4))


def a_norm_more_and_a_layer_less(run):
    training(run, range(2))
    run.raw.left = nn.Sequential(run.raw.left, nn.LayerNorm(8))
    run.raw.right = nn.Identity()
    training(run, range(2, 4))


def a_scale_and_a_buffer(run):
    training(run, range(2))
    run.raw.left.scale = nn.Parameter(torch.full((8,), 1.5))
    run.raw.left.register_buffer("shift", torch.full((8,), 0.5))
    run.raw.left.register_forward_hook(lambda m, args, output: output * m.scale + m.shift)
    optimizer = training(run, range(2, 4))
    del run.raw.left.shift
    run.raw.left.register_buffer("shift", torch.full((8,), 0.25))
    run.loop(optimizer, range(4, 6))


HABITS = {
    habit.__name__: habit
    for habit in (
        *(pruning, pruning_before_the_first_step, weight_norm_for_a_while),
        *(spectral_norm_for_a_while, norms_of_old, another_head, another_head_at_once),
        *(a_head_in_a_new_group, heads_in_turns, adapters, a_norm_more_and_a_layer_less),
        a_scale_and_a_buffer,
    )
}


def seed_by_replica(run):
    run.seed = 100 * smp.rdp_rank()  # replicas take the first one's values


def train_with_changes(config, names):
    # One microbatch, as every forward moves a spectral norm's vectors.
    return train_in_all_ways({"microbatches": 1, **config}, names, HABITS, seed_by_replica)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("stages", ["another_head"]),
        *in_two_worlds(HABITS),
        pytest.param(
            "gradients", ["another_head", "a_head_in_a_new_group"], marks=pytest.mark.slow
        ),
    ],
)
def test_changes(world, names):
    check_against_plain(train_with_changes, world, names, HABITS)


def save_and_resume(folder):
    """A changed model is saved under the names that it has now, and resumed by a new script."""
    found = []
    for is_first in (True, False):
        run = RankRun({"pipeline_parallel_degree": 2})
        run.seed = 0
        if not is_first:
            run.raw.last = head(run, 5)
            prune.identity(run.raw.left, "weight")
            smp.resume_from_checkpoint(folder, tag="changed")
            train_step(run.model, run.batch(0), "both")
        else:
            training(run, range(1))
            run.raw.last = head(run)
            prune.l1_unstructured(run.raw.left, "weight", 0.5)
            optimizer = training(run, range(1))
            smp.save_checkpoint(folder, tag="changed", model=run.model, optimizer=optimizer)
        found.append(run.model.state_dict())
        smp.shutdown()
    return found


@pytest.mark.slow
def test_checkpoints_have_the_names_of_now(tmp_path):
    for saved, resumed in run_ranks(save_and_resume, 2, str(tmp_path)):
        assert {"last.weight", "left.weight_orig", "left.weight_mask"} <= saved.keys()
        for name, value in saved.items():
            assert torch.equal(value, resumed[name]), name


# Changes that are no good.


def change_one_rank(config):
    model = made(config)
    train(model, ones())
    if smp.rank() == 1:
        model.module.second = nn.Linear(6, 3)
    return refused(lambda: train(model, ones()))


def test_other_changes_on_one_stage_are_an_error():
    results = run_ranks(change_one_rank, 2, TWO)
    check_texts(results[1:], RankMismatch, r"on rank 1, the module model\.second was replaced")


@pytest.mark.slow
def test_other_changes_on_one_replica_are_an_error():
    results = run_ranks(change_one_rank, 2, REPLICAS)
    text = r"rank 1 called a step function, or the model, with new parameters or buffers"
    check_texts(results[:1], RankMismatch, text)


def prune_divided():
    sharded = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
    model = made({**REPLICAS, **sharded})
    train(model, ones())
    prune.l1_unstructured(model.module.second, "weight", 0.5)
    return refused(lambda: train(model, ones()))


@pytest.mark.slow
def test_masks_of_divided_parameters_are_refused():
    text = r"second\.weight_mask, which the model got .* has no values on any rank"
    for _, found in run_ranks(prune_divided, 2):  # one may hear of the other's first
        assert re.search(text, found)


def split_and_changed():
    model = made({**REPLICAS, "tensor_parallel_degree": 2})
    model.module.second = nn.Linear(6, 3)
    return refused(lambda: train(model, ones()))


@pytest.mark.slow
def test_new_parameters_of_divided_layers_are_refused():
    text = r"The model has second\.bias, second\.weight, which .*nobody has divided the new ones"
    check_texts(run_ranks(split_and_changed, 2), CaptureError, text)
