"""Models built without memory have the values of models built in the ordinary way."""

import math

import pytest
import torch
from torch import nn

from mpxla import delayed
from mpxla.errors import MpxlaError

pytestmark = pytest.mark.unit


class Initialized(nn.Module):
    """Parameters initialized in many ways, after and while being made."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16, padding_idx=3)
        self.linear = nn.Linear(16, 40)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv1d(8, 16, 5)
        self.attention = nn.MultiheadAttention(16, 4)
        self.lstm = nn.LSTM(16, 16, 2)
        self.square = nn.Linear(24, 24)
        self.raw = nn.Parameter(torch.randn(30, 10) / math.sqrt(10))
        self.plan = nn.Parameter(torch.linspace(0, 1, 200).reshape(20, 10).t().contiguous())
        self.frozen = nn.Parameter(torch.full((100,), 2.0), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12, dtype=torch.bool)))
        self.register_buffer("steps", torch.arange(300), persistent=False)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.kaiming_normal_(self.conv.weight)
        self.attention.in_proj_weight.data.normal_(mean=0.0, std=0.3)
        with torch.no_grad():
            self.linear.bias[5:9].fill_(7.0)
            self.raw.mul_(self.raw.std().item())
            self.embedding.weight[8].copy_(self.raw[2].repeat(2)[:16])
            self.square.weight.copy_(torch.diag(torch.ones(24)) + self.square.weight)
        self.chosen = "large" if self.raw.abs().max() > 0.5 else "small"


def in_both_ways(build, seed=4):
    """(ordinary model, delayed model, random draws after each)."""
    torch.manual_seed(seed)
    ordinary = build()
    after = torch.rand(3)
    torch.manual_seed(seed)
    with delayed.build_delayed():
        recorded = build()
    assert torch.equal(torch.rand(3), after), "generators are where they would be"
    return ordinary, recorded


def tensors(model):
    return dict((*model.named_parameters(), *model.named_buffers()))


def check(ordinary, recorded):
    expected, actual = tensors(ordinary), tensors(recorded)
    assert expected.keys() == actual.keys()
    state = torch.get_rng_state()
    for name in reversed(expected):  # in another order than they were made
        value = delayed.materialize(name, actual[name])
        assert torch.equal(value, expected[name]), name
        assert (value.dtype, value.stride()) == (expected[name].dtype, expected[name].stride())
        assert value.untyped_storage().nbytes() == value.nbytes, name
        assert actual[name].requires_grad == expected[name].requires_grad
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(params=[2048, 30])
def small(request, monkeypatch):
    monkeypatch.setattr(delayed, "SMALL", request.param)
    return request.param


def test_values_are_those_of_the_ordinary_model(small):
    ordinary, recorded = in_both_ways(Initialized)
    if small == 30:
        assert sum(p.device.type == "meta" for p in recorded.parameters()) >= 10
    assert recorded.head.weight is recorded.embedding.weight
    assert recorded.chosen == ordinary.chosen
    check(ordinary, recorded)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    return GPT2LMHeadModel(GPT2Config(**sizes))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, vocab_size=50)
    return LlamaForCausalLM(LlamaConfig(intermediate_size=48, num_key_value_heads=1, **sizes))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, vocab_size=50)
    return BertForSequenceClassification(BertConfig(intermediate_size=48, **sizes))


@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_models_of_transformers(build, monkeypatch):
    monkeypatch.setattr(delayed, "SMALL", 100)
    ordinary, recorded = in_both_ways(build)
    assert sum(p.device.type == "meta" for p in recorded.parameters()) >= 8
    check(ordinary, recorded)


def test_a_generator_of_its_own(monkeypatch):
    monkeypatch.setattr(delayed, "SMALL", 30)

    def build():
        generator = torch.Generator().manual_seed(9)
        layer = nn.Linear(10, 10)
        nn.init.normal_(layer.weight, generator=generator)
        layer.after = torch.rand(1, generator=generator)
        return layer

    ordinary, recorded = in_both_ways(build)
    assert torch.equal(ordinary.after, recorded.after)
    check(ordinary, recorded)


def test_nothing_is_allocated_for_large_tensors():
    with delayed.build_delayed():
        weight = nn.Parameter(torch.zeros(1 << 20, 1 << 20))  # 4 TiB
    assert weight.device.type == "meta"
    assert delayed.is_delayed(weight) and not delayed.is_delayed(torch.ones(3))


def test_small_tensors_are_made_at_once():
    with delayed.build_delayed():
        layer = nn.Linear(64, 64)
        rates = torch.linspace(0, 1, 5).tolist()
    assert layer.bias.device.type == "cpu"
    assert layer.weight.device.type == "meta"
    assert rates[-1] == 1


def test_blocks_may_be_nested():
    with delayed.build_delayed(), delayed.build_delayed():
        layer = nn.Linear(64, 64)
    assert delayed.is_delayed(layer.weight)


def test_forgotten_tensors_have_no_values():
    with delayed.build_delayed():
        layer = nn.Linear(64, 64)
    delayed.forget([layer.weight])
    with pytest.raises(MpxlaError, match=r"w has no values: it was created on the device 'meta'"):
        delayed.materialize("w", layer.weight)


def test_a_change_after_the_block_is_an_error():
    with delayed.build_delayed():
        layer = nn.Linear(64, 64)
    nn.init.zeros_(layer.weight)
    with pytest.raises(MpxlaError, match=r"w was changed after the block of smp\.delay_param_in"):
        delayed.materialize("w", layer.weight)


def test_a_source_that_changes_is_an_error():
    source = torch.ones(64, 64)
    with delayed.build_delayed():
        layer = nn.Linear(64, 64)
        with torch.no_grad():
            layer.weight.copy_(source)
    assert torch.equal(delayed.materialize("w", layer.weight), source)
    source.zero_()
    with pytest.raises(MpxlaError, match=r"a tensor of shape \[64, 64\] that aten\.copy_"):
        delayed.materialize("w", layer.weight)


@pytest.mark.parametrize("read", [lambda t: t.numpy(), lambda t: t.tolist()])
def test_reading_large_values_is_an_error(read):
    with (
        pytest.raises(MpxlaError, match=r"values of a large tensor were read while the model was"),
        delayed.build_delayed(),
    ):
        read(torch.zeros(4000))


def test_other_errors_are_those_of_the_model():
    with pytest.raises(TypeError, match="must be"), delayed.build_delayed():
        nn.Linear("a", 2)


def test_every_model_can_be_delayed_without_a_block():
    delayed.delay_all_models(True)
    try:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        small = Initialized()
    finally:
        delayed.delay_all_models(False)
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert delayed.is_delayed(model[1].weight)
    check(expected, model)
    assert isinstance(small, Initialized)
    assert nn.Linear(64, 64).weight.device.type == "cpu"
    assert nn.Linear.__init__.__qualname__ == "Linear.__init__"
