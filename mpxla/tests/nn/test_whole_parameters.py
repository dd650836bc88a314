"""Steps that use split parameters outside of their layers compute what the whole model does."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.nn.in_threads import distributed, in_threads, lower, train_once

pytestmark = pytest.mark.unit

WORDS, WIDTH = 12, 8


class Block(nn.Module):
    """An MLP, whose inner columns are split."""

    _tp_plan = {"wide": "colwise", "narrow": "rowwise"}

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """With a table whose columns are split, and a head that reads it."""

    def __init__(self):
        super().__init__()
        self.table = smp.nn.DistributedEmbedding(WORDS, WIDTH, initializer_range=1.0)
        self.block, self.last = Block(), smp.nn.DistributedLinear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.table(ids)
        return functional.linear(self.last(x + self.block(x)), self.table.weight)


def net():
    torch.manual_seed(3)
    return Net()


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": WORDS}
    nothing = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **nothing, **ends))


def words():
    return torch.randint(WORDS, (4, 3), generator=torch.Generator().manual_seed(1))


def scores_of(model, ids):
    found = model(ids)
    return getattr(found, "logits", found)


def plain(model, ids):
    return functional.cross_entropy(scores_of(model, ids).flatten(0, 1), ids.flatten())


def penalized(model, ids):
    return plain(model, ids) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def with_counts(model, ids):
    sizes = (p.abs().sum() / p.numel() + p.std() / p.shape[0] for p in model.parameters())
    return plain(model, ids) + sum(sizes)


def with_norms(model, ids):
    parameters = [*model.parameters()]
    together = nn.utils.parameters_to_vector(parameters).norm()
    return plain(model, ids) + together + torch.stack(torch._foreach_norm(parameters)).prod()


def orthogonal(model, ids):
    products = (p.T @ p - torch.eye(p.shape[1]) for p in model.parameters() if p.dim() == 2)
    return plain(model, ids) + sum(product.square().mean() for product in products)


def of_elements(model, ids):
    picked = [p[0].sum() * p[..., -1].max() for p in model.parameters()]
    scaled = [(p * torch.arange(p.shape[-1])).square().mean() for p in model.parameters()]
    return plain(model, ids) + sum(picked) + 0.01 * sum(scaled)


def in_checkpoint(model, ids):
    return checkpoint(penalized, model, ids, use_reentrant=False)


def first_without_gradient(model, ids):
    with torch.no_grad():
        scales = {p: p.norm() for p in model.parameters()}
    return plain(model, ids) + sum(p.abs().mean() * scales[p] for p in model.parameters())


def with_others(model, ids):
    changed = {n: p * torch.linspace(0.9, 1.1, p.shape[-1]) for n, p in model.named_parameters()}

    def call(*args):
        return torch.func.functional_call(model, changed, args)

    return plain(call, ids) + plain(model, ids)


USES = [
    penalized,
    with_counts,
    with_norms,
    orthogonal,
    of_elements,
    in_checkpoint,
    first_without_gradient,
    with_others,
]


FAST_OF_GPT2 = (of_elements, with_others)
CASES = [(net, loss_of) for loss_of in USES]
CASES += [
    pytest.param(gpt2, loss_of, marks=[pytest.mark.slow] * (loss_of not in FAST_OF_GPT2))
    for loss_of in USES
]


@pytest.mark.parametrize("build, loss_of", CASES)
def test_losses_and_gradients(build, loss_of):
    whole = build()
    loss = loss_of(whole, words())
    loss.backward()
    ranks = distributed(build, 2)
    programs = [lower(rank, loss_of, [words()]) for rank in ranks]
    found = in_threads(train_once, ranks, programs, [[words()]] * 2)
    assert any(shard.blocks > 1 for shard in ranks[0].shards.values()) == (build is gpt2)
    for of_rank, _ in found:
        torch.testing.assert_close(of_rank, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in whole.named_parameters():
        parts = [gradients[name] for _, gradients in found]
        shard = ranks[0].shards.get(name)
        joined = parts[0] if shard is None else shard.join(parts)
        torch.testing.assert_close(joined, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def with_memory(model, ids):
    model.block.wide.weight.data.clamp_(-0.1, 0.1)
    return plain(model, ids)


def in_place(model, ids):
    with torch.no_grad():
        model.block.wide.weight.mul_(0.9)
    return plain(model, ids)


def assigned(model, ids):
    model.block.wide.weight.data = model.block.wide.weight.data.clamp(-0.1, 0.1)
    return plain(model, ids)


@pytest.mark.parametrize("loss_of", [with_memory, in_place, assigned])
def test_writes_are_refused(loss_of):
    said = r"writes to a parameter of which every rank .* part at .*test_whole_parameters.py.*Write"
    with pytest.raises(CaptureError, match=said):
        lower(distributed(net, 2)[0], loss_of, [words()])
