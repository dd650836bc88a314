"""Models whose layers are split over ranks compute what the whole model does; no device needed."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import mpxla as smp
from mpxla.graph.collectives import is_collective
from mpxla.nn.distribute import set_tensor_parallelism
from mpxla.nn.layers import Style, can_split
from mpxla.nn.plans import units_of
from mpxla.tests.nn.in_threads import Rank, distributed, in_threads, lower, train_once

pytestmark = pytest.mark.unit
transformers = pytest.importorskip("transformers")

WORDS = 32


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        vocab_size=WORDS,
        **{"num_key_value_heads": 2, "num_hidden_layers": 1, **options},
    )
    return transformers.LlamaForCausalLM(config)


def qwen3():
    """With norms of every head, which are whole and see a part of the heads."""
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
    )
    return transformers.Qwen3ForCausalLM(config)


def gpt2(**options):
    nothing = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**sizes, **nothing, **ends, **options})
    )


def bert():
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def roberta():
    config = transformers.RobertaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.RobertaForMaskedLM(config)


def mixtral():
    """Its experts are split each, and the routing is whole."""
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        num_local_experts=4,
        router_aux_loss_coef=0.1,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config)


def vit(**options):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.ViTConfig(**{**sizes, "num_hidden_layers": 1, **options})
    return transformers.ViTForImageClassification(config)


MODELS = {
    "roberta": roberta,
    "mixtral": mixtral,
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True, pad_token_id=3),
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bert": bert,
}


EACH = [pytest.param(n, marks=[pytest.mark.slow] * (n != "llama")) for n in MODELS]


def built(name):
    torch.manual_seed(0)
    return MODELS[name]()


def words():
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


@functools.cache
def parts_of(name):
    """A model's parts on two ranks, and their programs."""
    ranks = distributed(lambda: built(name), 2)
    return ranks, [lower(rank, loss_of, [words()]) for rank in ranks]


@pytest.mark.parametrize("name", EACH)
def test_loss_and_gradients_of_parts(name):
    whole = built(name)
    loss = loss_of(whole, words())
    loss.backward()
    ranks, lowered = parts_of(name)
    found = in_threads(train_once, ranks, lowered, [[words()]] * 2)
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for of_rank, _ in found:
        torch.testing.assert_close(of_rank, loss.detach(), rtol=1e-6, atol=1e-6)
    assert set(found[0][1]) == set(expected)
    assert ranks[0].shards, "something is split"
    for parameter, gradient in expected.items():
        parts = [gradients[parameter] for _, gradients in found]
        shard = ranks[0].shards.get(parameter)
        if shard is None:
            assert torch.equal(*parts), f"{parameter} is whole, and equal on all ranks"
        else:
            parts = [shard.join(parts)]
        torch.testing.assert_close(parts[0], gradient, rtol=1e-4, atol=1e-6, msg=parameter)


def collectives(module):
    graph = module.graph if hasattr(module, "graph") else module.derivative.graph
    names = [n.target._opname for n in graph.nodes if is_collective(n)]
    return Counter(name for name in names if name != "wait_tensor")


def test_two_sums_each_way_in_a_block():
    """In a block; others of the embedding and of the head with its loss, which gathers nothing."""
    _, ((_, lowered), _) = parts_of("llama")
    assert collectives(lowered.forward) == {"all_reduce": 2 + 1 + 2}
    assert collectives(lowered.backward) == {"all_reduce": 2 + 1}


@pytest.mark.parametrize(
    "reduction", ["mean", *(pytest.param(r, marks=pytest.mark.slow) for r in ("sum", "none"))]
)
def test_losses_of_scores_that_are_split(reduction):
    def of_rows(scores, ids):
        labels = torch.where(ids[:, 1:] == 5, -100, ids[:, 1:]).flatten()
        rows = scores[:, :-1].double().reshape(-1, WORDS)
        return nn.functional.cross_entropy(rows, labels, reduction=reduction).sum()

    class Words(nn.Module):
        _tp_plan = {"head": "colwise_gather_output"}

        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

        def get_output_embeddings(self):
            return self.head

    def build():
        torch.manual_seed(5)
        return Words()

    def scaled(model, ids):
        return of_rows(model.head(30 * model.rows(ids)), ids)

    whole, ids = build(), words()
    ids[0, 2] = 5
    loss = scaled(whole, ids)
    loss.backward()
    ranks = distributed(build, 2)
    programs = [lower(rank, scaled, [ids]) for rank in ranks]
    assert collectives(programs[0][1].forward) == {"all_reduce": 2}
    (found, gradients), (_, other) = in_threads(train_once, ranks, programs, [[ids]] * 2)
    torch.testing.assert_close(found, loss.detach())
    parts = [gradients["head.weight"], other["head.weight"]]
    joined = ranks[0].shards["head.weight"].join(parts)
    torch.testing.assert_close(joined, whole.head.weight.grad)
    torch.testing.assert_close(gradients["rows.weight"], whole.rows.weight.grad)


@pytest.mark.slow
def test_scores_that_are_used_otherwise_are_gathered():
    ranks = distributed(lambda: built("llama"), 2)

    def scaled(model, ids):
        scores = 2 * model(input_ids=ids).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())

    whole = built("llama")
    programs = [lower(rank, scaled, [words()]) for rank in ranks]
    assert collectives(programs[0][1].forward)["all_gather_into_tensor"] == 1
    (found, _), _ = in_threads(train_once, ranks, programs, [[words()]] * 2)
    torch.testing.assert_close(found, scaled(whole, words()).detach())


def test_every_rank_keeps_its_part_of_the_values():
    whole = dict(built("gpt2").named_parameters())
    ranks = distributed(lambda: built("gpt2"), 2)
    for name, shard in ranks[0].shards.items():
        parts = [dict(rank.model.named_parameters())[name] for rank in ranks]
        assert {tuple(part.shape) for part in parts} == {shard.shape}
        assert torch.equal(shard.join(parts), whole[name])
    fused = ranks[0].shards["transformer.h.0.attn.c_attn.weight"]
    assert (fused.dim, fused.blocks, fused.shape) == (1, 3, (16, 24))
    assert ranks[0].model.transformer.h[0].attn.split_size == 8
    assert ranks[0].model.transformer.h[0].mlp.c_fc.nf == 32
    assert ranks[0].model.lm_head.out_features == WORDS, "it gives the scores of all words"


def test_ranks_take_the_values_of_the_first():
    models = iter([built("llama"), llama()])
    ranks = distributed(lambda: next(models), 2)
    whole = dict(built("llama").named_parameters())
    for name, shard in ranks[0].shards.items():
        parts = [dict(rank.model.named_parameters())[name] for rank in ranks]
        assert torch.equal(shard.join(parts), whole[name])
    assert torch.equal(ranks[1].model.model.norm.weight, whole["model.norm.weight"])


def problems(model, size):
    return {unit.path: unit.problem for unit in units_of(model, size) if unit.problem}


def test_heads_and_words_that_do_not_divide():
    found = problems(llama(num_key_value_heads=1), 2)
    assert set(found) == {"model.layers.0.self_attn"}
    assert "the 1 heads of model.layers.0.self_attn.k_proj do not divide by 2" in str(found)
    found = problems(gpt2(vocab_size=33), 2)
    assert "its 33 do not divide by 2; pad to 34" in found["transformer.wte"]


def test_layers_that_have_the_name_of_known_ones_are_others():
    own = type("BertLayer", (nn.Module,), {})()
    own.dense = nn.Linear(4, 4)
    assert units_of(nn.Sequential(own), 2) == []


def test_layers_whose_weight_is_computed_stay_whole():
    model = llama()
    nn.utils.prune.identity(model.model.layers[0].mlp.up_proj, "weight")
    found = problems(model, 2)
    assert set(found) == {"model.layers.0.mlp"}
    assert "a Linear cannot be split by column" in str(found)


def test_parameters_of_heads_that_a_plan_splits():
    class Attention(nn.Module):
        _tp_plan = {"q": "colwise", "o": "rowwise", "sinks": "colwise"}

        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
            self.sinks = nn.Parameter(torch.zeros(2))

    found = problems(nn.Sequential(Attention()), 2)
    assert found == {"0": "mpxla does not split 0.sinks, which is no part of a layer"}


def test_tied_ends_are_split_alike_or_not_at_all():
    model = llama(tie_word_embeddings=True)
    assert not problems(model, 2)
    model.lm_head.forward = model.lm_head.forward  # somebody's own, which is not replaced
    found = problems(model, 2)
    assert set(found) == {"lm_head", "model.embed_tokens"}
    assert "shares its weight with" in found["model.embed_tokens"]


def test_parts_that_are_switched_off_stay_whole():
    def build():
        torch.manual_seed(0)
        model = llama(num_hidden_layers=2)
        set_tensor_parallelism(model.model.layers[0], False)
        return model

    ranks = distributed(build, 2)
    assert not any(".layers.0." in name for name in ranks[0].shards)
    assert any(".layers.1." in name for name in ranks[0].shards)


@pytest.mark.slow
def test_models_of_images():
    """A class token and a patch convolution stay whole, and blocks are split."""

    def build():
        torch.manual_seed(0)
        return vit(image_size=8, patch_size=4, num_labels=3)

    def loss_of(model, images, labels):
        return model(pixel_values=images, labels=labels).loss

    inputs = [torch.randn(2, 3, 8, 8), torch.tensor([0, 2])]
    whole = build()
    loss = loss_of(whole, *inputs)
    loss.backward()
    ranks = distributed(build, 2)
    programs = [lower(rank, loss_of, inputs) for rank in ranks]
    (found, gradients), (_, other) = in_threads(train_once, ranks, programs, [inputs] * 2)
    torch.testing.assert_close(found, loss.detach())
    layers = ("attention.q_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")
    assert all(f"vit.layers.0.{layer}.weight" in ranks[0].shards for layer in layers)
    for name, parameter in whole.named_parameters():
        shard = ranks[0].shards.get(name)
        gradient = gradients[name] if shard is None else shard.join([gradients[name], other[name]])
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_experts_that_are_not_plain_stay_whole():
    config = transformers.GptOssConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
        num_local_experts=2,
    )
    experts = transformers.GptOssForCausalLM(config).model.layers[0].mlp.experts
    assert "cannot be split by experts" in str(can_split(experts, Style.EXPERTS, 2))


class Dropping(nn.Module):
    """Gives its masks: the inner layer gives ones, and the outer one hands each of them on."""

    _tp_plan = {"inner": "colwise", "outer": "rowwise"}

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.inner.weight)
        nn.init.ones_(self.inner.bias)
        nn.init.eye_(self.outer.weight)

    def forward(self, x):
        kept = nn.functional.dropout(self.inner(x), 0.5)
        after = self.outer(kept)
        return after, nn.functional.dropout(after, 0.5)


def test_dropout_of_parts_differs_and_of_wholes_agrees():
    x = torch.zeros(32, 4)
    ranks = distributed(Dropping, 2)
    programs = [lower(rank, lambda m, v: m(v)[1].square().sum(), [x]) for rank in ranks]
    (loss, _), (other_loss, _) = in_threads(train_once, ranks, programs, [[x]] * 2)
    assert torch.equal(loss, other_loss), "what is whole is dropped alike"
    # The gradient of a unit's bias counts the samples that kept it: of equal masks it is equal.
    programs = [lower(rank, lambda m, v: m(v)[0].square().sum(), [x]) for rank in ranks]
    (_, gradients), (_, other) = in_threads(train_once, ranks, programs, [[x]] * 2)
    assert not torch.equal(gradients["inner.bias"], other["inner.bias"])


@pytest.mark.slow
def test_attention_dropout_is_lowered():
    ranks = distributed(lambda: gpt2(attn_pdrop=0.5, resid_pdrop=0.5), 2)
    programs = [lower(rank, loss_of, [words()]) for rank in ranks]
    (loss, gradients), (other, _) = in_threads(train_once, ranks, programs, [[words()]] * 2)
    assert torch.equal(loss, other)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_what_differs_between_ranks_is_not_returned():
    from mpxla.errors import CaptureError

    ranks = distributed(lambda: built("llama"), 2)

    def inside(model, ids):
        part = model.model.layers[0].mlp.gate_proj(model.model.embed_tokens(ids))
        return (part @ torch.ones(16, 1)).sum()

    with pytest.raises(CaptureError, match="differs between the ranks of a tensor-parallel group"):
        lower(ranks[0], inside, [words()])


def test_a_group_without_the_name_is_refused():
    from mpxla.errors import LoweringError
    from mpxla.stage.collective import CollectiveRunner
    from mpxla.stage.pieces import CollectivePiece
    from mpxla.tests.nn.in_threads import cut_in_pieces

    _, ((_, lowered), _) = parts_of("llama")
    plan = cut_in_pieces(lowered.forward, lowered.forward_inputs)
    piece = next(p for p in plan.pieces if isinstance(p, CollectivePiece))
    with pytest.raises(LoweringError, match="over the group 'tensor', which this program was"):
        CollectiveRunner("stage 0 forward", piece, {}, None, None)


def test_calls_outside_of_steps_are_refused():
    from mpxla.errors import StepError

    ranks: list[Rank] = distributed(lambda: built("llama"), 2)
    with pytest.raises(StepError, match="called outside a step function"):
        ranks[0].model(words())


class OwnLayers(nn.Module):
    """A model made of the layers of `smp.nn`."""

    def __init__(self):
        super().__init__()
        self.words = smp.nn.DistributedEmbedding(WORDS, 8, padding_idx=3)
        self.inner = smp.nn.DistributedLinear(8, 16)
        self.outer = smp.nn.DistributedLinear(16, WORDS, bias=False)

    def forward(self, ids):
        return self.outer(self.inner(self.words(ids)).relu())


def test_layers_that_scripts_use_themselves():
    def build():
        torch.manual_seed(4)
        return OwnLayers()

    def loss_of(model, ids):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    whole = build()
    ids = words()
    ids[0, 0] = 3
    loss = loss_of(whole, ids)
    loss.backward()
    ranks = distributed(build, 2, is_marked=False)
    assert ranks[0].shards["words.weight"].shape == (WORDS, 4)
    assert ranks[0].shards["inner.weight"].shape == (16, 4)
    programs = [lower(rank, loss_of, [ids]) for rank in ranks]
    (found, gradients), (_, other) = in_threads(train_once, ranks, programs, [[ids]] * 2)
    torch.testing.assert_close(found, loss.detach())
    for name, parameter in whole.named_parameters():
        shard = ranks[0].shards.get(name)
        gradient = gradients[name] if shard is None else shard.join([gradients[name], other[name]])
        torch.testing.assert_close(gradient, parameter.grad, msg=name)


def test_an_optional_bias_stays_whole_in_a_row_layer():
    class Block(nn.Module):
        _tp_plan = {"up": "colwise", "down": "rowwise"}

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(self.up(x).relu())

    def build():
        torch.manual_seed(2)
        return Block()

    x = torch.randn(3, 4)
    ranks = distributed(build, 2)
    assert set(ranks[0].shards) == {"up.weight", "up.bias", "down.weight"}
    lowered = [lower(rank, lambda m, v: m(v).square().sum(), [x]) for rank in ranks]
    (loss, _), _ = in_threads(train_once, ranks, lowered, [[x]] * 2)
    torch.testing.assert_close(loss, build()(x).square().sum().detach())


class Wrapper(torch.nn.Module):
    """As scripts put one around a model of transformers; it forwards what it does not have."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@pytest.mark.parametrize("name", EACH)
def test_models_in_a_wrapper_are_split_alike(name):
    def found(model, prefix=""):
        return {
            f"{prefix}{unit.path}": [(f"{prefix}{e.path}", e.style, e.blocks) for e in unit.entries]
            for unit in units_of(model, 2)
        }

    assert found(Wrapper(built(name))) == found(built(name), "inner.")


def test_a_plan_of_a_layer_in_a_model():
    class Layer(torch.nn.Module):
        _tp_plan = {"up": "colwise", "down": "rowwise"}

        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    (unit,) = units_of(torch.nn.Sequential(torch.nn.Linear(4, 4), Layer()), 2)
    assert unit.path == "1" and unit.problem is None
    assert [entry.path for entry in unit.entries] == ["1.up", "1.down"]
