"""Ranks that do different things end with a text that says so, on all ranks."""

import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import (
    RankMismatch,
)
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import REPLICAS, TWO, Net, batch, check, evaluate, made, refused, train

pytestmark = pytest.mark.ranks


# Ranks that differ.


def differ_in_configuration():
    import os

    smp.init({**TWO, "microbatches": 2 + int(os.environ["RANK"]), "pipeline": "simple"})


def test_different_configurations():
    check(
        differ_in_configuration,
        RankMismatch,
        r"ranks 0 and 1 were started with different configurations:\n"
        r"microbatches: 2 on rank 0, 3 on rank 1\n",
    )


def differ_in_backend():
    import os

    os.environ["MPXLA_DEVICE"] = ("torch_xla", "pjrt")[int(os.environ["RANK"])]
    smp.init(TWO)


@pytest.mark.torch_xla
def test_different_backends():
    check(
        differ_in_backend,
        RankMismatch,
        r"different configurations:\nMPXLA_DEVICE: 'torch_xla' on rank 0, 'pjrt' on rank 1\n",
    )


def differ_in_width():
    smp.init(TWO)
    train(smp.DistributedModel(Net(6 + 2 * smp.rank())), batch())


def test_different_models():
    check(
        differ_in_width,
        RankMismatch,
        r"ranks \[1\] have another model or script than rank 0:\n"
        r"  first\.weight: float32\[6, 5\] on rank 0\n"
        r"  first\.weight: float32\[8, 5\] on rank 1\nStart the same script",
    )


def replicas_differ_in_width():
    smp.init(REPLICAS)
    model = smp.DistributedModel(Net(6 + 2 * smp.rank()))
    train(model, batch())


def test_different_models_of_replicas():
    pattern = r"ranks \[1\] have another model than rank 0:\n.*\[6, 5\] on rank 0\n.*\[8, 5\] on"
    check(replicas_differ_in_width, RankMismatch, pattern)


def differ_in_step():
    model = made()

    @smp.step
    def function(model, x):
        y = model(x)
        return y.relu() if smp.rank() else y.sigmoid()

    function(model, batch())


def test_different_bodies_of_a_step():
    check(
        differ_in_step,
        RankMismatch,
        r"ranks \[1\] captured another step than rank 0:\n[^\n]*sigmoid[^\n]* on rank 0\n"
        r"[^\n]*relu[^\n]* on rank 1\n",
    )


def differ_in_function():
    model = made()
    (evaluate if smp.rank() else train)(model, batch())


def test_different_step_functions():
    first, _ = check(
        differ_in_function,
        RankMismatch,
        r"pp_rank 0 calls the step function \S*train while rank 1 \(pp_rank 1\) calls \S*evaluate",
        at=[1],
    )
    assert first[0] == "PeerFailure"
    assert "rank 1 raised RankMismatch" in first[1]


def differ_in_objects():
    model = made()
    step = smp.step(lambda model, x, criterion: criterion(model(x)))
    step(model, batch(), nn.ReLU() if smp.rank() == 0 else None)


def test_different_arguments():
    first, _ = check(
        differ_in_objects,
        RankMismatch,
        r"pp_rank 0 passes a ReLU at \[0\]\[2\], and this rank passes none there",
        at=[1],
    )
    assert first[0] == "PeerFailure"


def differ_in_mode():
    model = made()
    if smp.rank() == 1:
        model.eval()
    train(model, batch())


def test_different_modes():
    first, _ = check(
        differ_in_mode,
        RankMismatch,
        r"train/eval mode of the model on rank 1 differs from pp_rank 0\. Call model\.train\(\)",
        at=[1],
    )
    assert first[0] == "PeerFailure"


def differ_in_number_of_models():
    model = made()
    if smp.rank() == 1:
        smp.DistributedModel(Net())
    train(model, batch())


def test_different_numbers_of_models():
    first, _ = check(
        differ_in_number_of_models, RankMismatch, r"make the same models on all of them", at=[1]
    )
    assert first[0] == "PeerFailure"


def differ_in_the_second_model():
    made()
    train(smp.DistributedModel(Net(6 + 2 * smp.rank())), batch())


def test_different_second_models():
    check(
        differ_in_the_second_model,
        RankMismatch,
        r"have another model or script.*\n  model_2\.first\.weight: float32\[6, 5\] on rank 0\n",
    )


def differ_in_what_is_trained():
    model = made()
    if smp.rank() == 1:
        model.module.first.requires_grad_(False)
    train(model, batch())


def test_different_frozen_parameters():
    first, _ = check(
        differ_in_what_is_trained,
        RankMismatch,
        r"requires_grad of the model's parameters on rank 1 differs from pp_rank 0\. Freeze the",
        at=[1],
    )
    assert first[0] == "PeerFailure"


def differ_in_mode_later():
    model = made()
    train(model, batch())
    return differ_in_mode_of(model)


def differ_in_mode_of(model):
    if smp.rank() == 1:
        model.eval()
    return refused(lambda: train(model, batch()).reduce_mean().item())


def test_different_modes_in_a_later_step():
    first, second = run_ranks(differ_in_mode_later, 2)
    assert second[0] == "RankMismatch"
    assert first[0] == "PeerFailure"


# Calls that all ranks have to make, made by some.


def optimizer_of(model):
    return smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


CALLS = {
    "model.state_dict()": lambda model, optimizer: model.state_dict(),
    "optimizer.state_dict()": lambda model, optimizer: optimizer.state_dict(),
    "clip_grad_norm_()": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1),
    "smp.save_checkpoint()": lambda model, optimizer: smp.save_checkpoint(
        "/tmp/nowhere", "tag", model=model
    ),
}


def call_on_one_rank(rank, name, then, config):
    model = made(config)
    optimizer = optimizer_of(model)
    train(model, batch())
    optimizer.step()
    if smp.rank() == rank:
        model.partition_report()  # may be called by one rank
        CALLS[name](model, optimizer)
    if then == "step":
        train(model, batch()).reduce_mean().item()
        train(model, batch()).reduce_mean().item()
    elif then is not None:
        CALLS[then](model, optimizer)


def refused_on_one_rank(*arguments):
    return refused(lambda: call_on_one_rank(*arguments))


@pytest.mark.parametrize(
    ("rank", "name", "then"),
    [
        pytest.param(0, "model.state_dict()", "step", marks=pytest.mark.slow),
        (1, "model.state_dict()", "step"),
        (0, "model.state_dict()", "optimizer.state_dict()"),
        (0, "clip_grad_norm_()", "step"),
        pytest.param(1, "optimizer.state_dict()", "step", marks=pytest.mark.slow),
        (0, "smp.save_checkpoint()", "step"),
    ],
)
def test_a_call_of_one_rank_of_a_pipeline(rank, name, then):
    found = run_ranks(refused_on_one_rank, 2, rank, name, then, TWO)
    assert sorted(kind for kind, _ in found) == ["PeerFailure", "RankMismatch"]
    for _, text in found:
        assert re.search(rf"{re.escape(name)} at \S*test_wrong_ranks\.py:\d+: ", text), text
        assert f"have to call {name}" in text or f"have to call {then}" in text, text


@pytest.mark.slow
def test_a_call_of_one_rank_at_the_end():
    first, second = run_ranks(refused_on_one_rank, 2, 0, "model.state_dict()", None, TWO)
    assert second == ("nothing", "was raised")
    assert re.search(
        r"rank 1 finished .* Rank 0 was in model\.state_dict\(\) at \S*test_wrong_ranks\.py:\d+: "
        r".* then, which the ranks \[0, 1\] have to call together",
        first[1],
    ), first[1]


@pytest.mark.parametrize(
    "name",
    [pytest.param("optimizer.state_dict()", marks=pytest.mark.slow), "smp.save_checkpoint()"],
)
def test_a_call_of_one_replica(name):
    config = {**REPLICAS, "shard_optimizer_state": True}
    found = run_ranks(refused_on_one_rank, 2, 0, name, "step", config)
    assert sorted(kind for kind, _ in found) == ["PeerFailure", "RankMismatch"]
    for _, text in found:
        assert re.search(rf"rank 0 called {re.escape(name)} at \S*test_wrong_ranks\.py:\d+", text)
        assert f"All ranks of all replicas have to call {name}" in text


class Twice(nn.Module):
    """Calls its split layers once, or as often as it is told."""

    def __init__(self):
        super().__init__()
        self.layer = smp.nn.DistributedLinear(4, 4)
        self.times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return x


def tensor_parallel_ranks_differ():
    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    raw = Twice()
    raw.times += smp.tp_rank()
    train(smp.DistributedModel(raw), torch.ones(4, 4))


def test_tensor_parallel_ranks_with_other_layers():
    check(
        tensor_parallel_ranks_differ,
        RankMismatch,
        r"ranks \[1\] share the tensors of a model, and captured another step than rank 0:\n"
        r"  aten::square in the step function [^\n]* on rank 0\n"
        r"  mpxla_tensor::vary in model.layer [^\n]* on rank 1\n",
    )
