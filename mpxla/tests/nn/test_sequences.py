"""Sequence parallelism computes what the whole model does, and keeps 1 / ranks of its streams."""

import functools

import pytest
import torch

from mpxla.tests.nn.in_threads import distributed, in_threads, lower, train_once
from mpxla.tests.nn.test_split_models import MODELS, built, collectives, gpt2, llama, loss_of
from mpxla.tests.nn.test_split_models import words as some_words

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gpt2")) for n in MODELS]
)
def test_loss_and_gradients_of_parts(name):
    whole = built(name)
    loss = loss_of(whole, some_words())
    loss.backward()
    ranks = distributed(lambda: built(name), 2)
    lowered = [lower(rank, loss_of, [some_words()], divides_sequences=True) for rank in ranks]
    # Of attention and MLP, and of the embedding where it is split.
    assert collectives(lowered[0][1].forward)["reduce_scatter_tensor"] == 2 + (
        any("embed" in name or "wte" in name for name in ranks[0].shards)
    )
    found = in_threads(train_once, ranks, lowered, [[some_words()]] * 2)
    for of_rank, _ in found:
        torch.testing.assert_close(of_rank, loss.detach(), rtol=1e-6, atol=1e-6)
    for parameter, value in whole.named_parameters():
        if value.grad is None:
            continue
        parts = [gradients[parameter] for _, gradients in found]
        shard = ranks[0].shards.get(parameter)
        if shard is None:
            assert torch.equal(*parts), f"{parameter} is whole, and equal on all ranks"
        joined = parts[0] if shard is None else shard.join(parts)
        torch.testing.assert_close(joined, value.grad, rtol=1e-4, atol=1e-6, msg=parameter)


@functools.cache
def lowered_rank(num_ranks, is_divided, num_layers):
    """The lowered stage of one of some ranks."""
    options = {"attn_implementation": "eager", "num_hidden_layers": num_layers}
    rank = distributed(lambda: llama(**options), num_ranks)[0]
    _, lowered = lower(rank, loss_of, [torch.zeros(2, 64, dtype=torch.long)], is_divided)
    return lowered


def of_blocks(is_divided):
    """Collectives (forward, backward) that a further block adds."""
    few, many = (lowered_rank(2, is_divided, num_layers) for num_layers in (0, 1))
    counts = [[collectives(one.forward), collectives(one.backward)] for one in (few, many)]
    return [dict(two - one) for one, two in zip(*counts, strict=True)]


@pytest.mark.slow
def test_collectives_of_a_block():
    """Two sums each way, or their halves; and small sums for the gradients of its two norms."""
    assert of_blocks(False) == [{"all_reduce": 2}, {"all_reduce": 2}]
    halves = {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2}
    assert of_blocks(True) == [halves, {**halves, "all_reduce": 2}]


@pytest.mark.slow
def test_lengths_that_do_not_divide_stay_whole():
    (rank, _) = distributed(lambda: built("llama"), 2)
    odd = some_words()[:, :7]
    _, lowered = lower(rank, loss_of, [odd], divides_sequences=True)
    assert "reduce_scatter_tensor" not in collectives(lowered.forward)


def kept_bytes(*key):
    """Activations that a rank keeps for the backward of one microbatch."""
    return sum(spec.num_bytes for spec in lowered_rank(*key).saved_specs)


@pytest.mark.slow
def test_activations_of_a_rank():
    """What further blocks keep is 1 / ranks of what they keep on one rank, within a tenth."""

    def of_layers(size, is_divided):
        few, many = (kept_bytes(size, is_divided, n) for n in (0, 1))
        return many - few

    bound = 1.1 * of_layers(1, False) / 2
    assert of_layers(2, True) < bound
    assert of_layers(2, False) > bound, "streams are whole without"


@pytest.mark.slow
def test_dropout_of_positions_differs():
    """What a rank drops of its positions is its own, and results agree."""
    ranks = distributed(lambda: gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), 2)
    programs = [lower(rank, loss_of, [some_words()], divides_sequences=True) for rank in ranks]
    (loss, gradients), (other, _) = in_threads(train_once, ranks, programs, [[some_words()]] * 2)
    assert torch.equal(loss, other)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
