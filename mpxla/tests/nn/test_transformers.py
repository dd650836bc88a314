"""The transformers of `smp.nn` compute what torch's and transformers' do, whole and in parts."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import ConfigError
from mpxla.tests.nn.in_threads import distributed, in_threads, lower, train_once

pytestmark = pytest.mark.unit

SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16}
MLP = {"intermediate_size": 32}
DRY = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
WORDS = 32


def copy_linear(target, weight, bias):
    with torch.no_grad():
        target.weight.copy_(weight)
        target.bias.copy_(bias)


def copy_attention(target, packed):
    """Values of `nn.MultiheadAttention`."""
    parts = zip(packed.in_proj_weight.chunk(3), packed.in_proj_bias.chunk(3), strict=True)
    for layer, (weight, bias) in zip((target.query, target.key, target.value), parts, strict=True):
        copy_linear(layer, weight, bias)
    copy_linear(target.dense, packed.out_proj.weight, packed.out_proj.bias)


def additive(masked):
    return masked[:, None, None, :].float() * -1e9


@pytest.mark.parametrize("is_pre", [False, True])
def test_a_layer_is_that_of_torch(is_pre):
    torch.manual_seed(1)
    expected = nn.TransformerEncoderLayer(
        16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=is_pre
    )
    norms = {"pre_layernorm": is_pre, "post_layernorm": not is_pre}
    layer = smp.nn.DistributedTransformerLayer(**SIZES, **MLP, **DRY, **norms, causal_mask_size=8)
    copy_attention(layer.attention, expected.self_attn)
    copy_linear(layer.output.dense1, expected.linear1.weight, expected.linear1.bias)
    copy_linear(layer.output.dense2, expected.linear2.weight, expected.linear2.bias)
    for block, norm in ((layer.attention, expected.norm1), (layer.output, expected.norm2)):
        nn.init.uniform_(norm.weight)
        own = block.pre_layernorm if is_pre else block.layernorm
        copy_linear(own, norm.weight, norm.bias)
    x, masked = torch.randn(2, 8, 16), torch.zeros(2, 8, dtype=torch.bool)
    masked[1, 3] = True
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)
    found, mask = layer((x, additive(masked)))
    torch.testing.assert_close(
        found, expected(x, src_mask=later, src_key_padding_mask=masked), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(mask, additive(masked)), "handed on to the next layer"


def test_cross_attention_is_that_of_torch():
    torch.manual_seed(2)
    expected = nn.TransformerDecoderLayer(16, 4, 32, 0.0, "relu", batch_first=True)
    layer = smp.nn.DistributedTransformerLayer(
        **SIZES, **MLP, **DRY, activation="relu", add_cross_attention=True
    )
    copy_attention(layer.attention, expected.self_attn)
    copy_attention(layer.cross_attention, expected.multihead_attn)
    copy_linear(layer.output.dense1, expected.linear1.weight, expected.linear1.bias)
    copy_linear(layer.output.dense2, expected.linear2.weight, expected.linear2.bias)
    x, others = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    masked = torch.zeros(2, 7, dtype=torch.bool)
    masked[0, 2] = True
    found, *_ = layer((x, others, None, additive(masked)))
    torch.testing.assert_close(
        found, expected(x, others, memory_key_padding_mask=masked), rtol=1e-5, atol=1e-5
    )


def language_model(**options):
    torch.manual_seed(3)
    norms = {"pre_layernorm": True, "post_layernorm": False}
    ends = {"num_layers": 2, "vocab_size": WORDS, "num_positions": 16, "causal_mask_size": 16}
    settings = {**SIZES, **MLP, **DRY, **ends, **norms, **options}
    return smp.nn.DistributedTransformerLMHead(**settings)


def words():
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))


def test_the_language_model_is_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_inner=32,
        n_positions=16,
        vocab_size=WORDS,
        activation_function="gelu",
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    )
    expected, model = transformers.GPT2LMHeadModel(config), language_model()
    inner = expected.transformer
    with torch.no_grad():
        model.word_embedding.weight.copy_(inner.wte.weight)
        model.position_embedding.weight.copy_(inner.wpe.weight)
    copy_linear(model.layernorm, inner.ln_f.weight, inner.ln_f.bias)
    for own, block in zip(model.transformer.seq_layers, inner.h, strict=True):
        fused = block.attn.c_attn
        parts = zip(fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True)
        for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
            copy_linear(getattr(own.attention, name), weight.T, bias)
        for layer, theirs in (
            (own.attention.dense, block.attn.c_proj),
            (own.output.dense1, block.mlp.c_fc),
            (own.output.dense2, block.mlp.c_proj),
        ):
            copy_linear(layer, theirs.weight.T, theirs.bias)
    ids, masked = words(), torch.zeros(2, 8, dtype=torch.long)
    masked[0, :2] = 1
    found = model((ids, masked, None, None, None))
    kept = expected(input_ids=ids, attention_mask=1 - masked, position_ids=torch.arange(8)[None])
    torch.testing.assert_close(found[:, 2:], kept.logits[:, 2:], rtol=1e-4, atol=1e-5)
    loss = model((ids, None, None, None, ids))
    torch.testing.assert_close(loss, expected(input_ids=ids, labels=ids).loss)


MODELS = {
    "causal": lambda: language_model(),
    "alibi": lambda: language_model(use_alibi=True, num_layers=1),
    "both norms": lambda: language_model(post_layernorm=True, causal_mask_size=None, num_layers=1),
    "types": lambda: language_model(num_token_types=2, num_layers=1),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "types")) for n in MODELS],
)
def test_parts_of_a_language_model(name):
    ids = words()
    types = ids % 2 if name == "types" else None

    def loss_of(model, ids):
        return model((ids, (ids == 5).long(), types, None, ids))

    whole = MODELS[name]()
    loss = loss_of(whole, ids)
    loss.backward()
    ranks = distributed(MODELS[name], 2, is_marked=False)
    assert "word_embedding.weight" in ranks[0].shards, "split without being asked"
    assert "transformer.seq_layers.0.attention.query.weight" in ranks[0].shards
    programs = [lower(rank, loss_of, [ids]) for rank in ranks]
    (found, gradients), (_, other) = in_threads(train_once, ranks, programs, [[ids]] * 2)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=1e-6)
    for parameter, value in whole.named_parameters():
        if value.grad is None:
            continue
        shard = ranks[0].shards.get(parameter)
        parts = [gradients[parameter], other[parameter]]
        joined = parts[0] if shard is None else shard.join(parts)
        torch.testing.assert_close(joined, value.grad, rtol=1e-4, atol=1e-6, msg=parameter)


def test_the_bias_of_distances():
    """Head h of n adds -2**(-8 (h + 1) / n) times the distance."""
    layer = smp.nn.DistributedAttentionLayer(**SIZES, use_alibi=True)
    bias = layer._bias(None, torch.zeros(1, 4, 3, 4), 3)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    assert torch.equal(bias[:, 2, 0], -2 * slopes)
    assert torch.equal(bias[:, 1, 1], torch.zeros(4))


def test_packed_attention_is_that_of_torch():
    qkv = torch.randn(2, 5, 3, 4, 8)
    layer = smp.nn.FlashAttentionLayer(0.0, 8, scale_attn_by_layer_idx=True, layer_idx=1)
    query, key, value = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    expected = nn.functional.scaled_dot_product_attention(query / 2, key, value, is_causal=True)
    torch.testing.assert_close(layer(qkv, causal=True), expected)
    mask = torch.zeros(2, 1, 1, 5)
    torch.testing.assert_close(layer(qkv, mask, causal=True), expected)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: smp.nn.DistributedAttentionLayer(**SIZES, post_layernorm=False),
            "pre_layernorm and post_layernorm are both False",
        ),
        (
            lambda: smp.nn.DistributedTransformerOutputLayer(16, 32, activation="tanh"),
            "activation is 'tanh'; use 'gelu' or 'relu'",
        ),
        (lambda: smp.nn.FlashAttentionLayer(), "needs attention_head_size for its scale"),
        (
            lambda: smp.nn.DistributedAttentionLayer(**SIZES)(torch.zeros(1, 2, 16)),
            r"got a tensor; call it with one tuple \(hidden_states, attention_mask\)",
        ),
        (lambda: language_model()((words(),)), "got 1 values; call it with one tuple"),
        (
            lambda: language_model(add_lm_head=False)((words(), None, None, None, words())),
            "got labels and has no head",
        ),
        (
            lambda: language_model(causal_mask_size=4)((words(), None, None, None, None)),
            "a sequence has 8 positions, and causal_mask_size is 4",
        ),
    ],
)
def test_wrong_use(build, text):
    with pytest.raises(ConfigError, match=text):
        build()
