"""Sizes, memory and times of transformers on paper, against hand-worked cases."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

import mpxla.planning
from mpxla.errors import ConfigError
from mpxla.planning.device import DeviceModel
from mpxla.planning.files import read_file, shipped
from mpxla.planning.layout import Layout, problems
from mpxla.planning.memory import (
    device_layer_weights,
    kept_bytes,
    layer_activation_bytes,
    parameter_bytes,
    saved_bytes,
    spread_layers,
)
from mpxla.planning.predict import memory_of, predict, simulated
from mpxla.planning.transformer import Transformer
from mpxla.planning.work import Part, Work, step_costs
from mpxla.schedule.search import Candidate, search
from mpxla.tests.planning.published import compare, published

pytestmark = pytest.mark.unit

A100 = read_file("device", "a100-80gb", DeviceModel)
GPT3 = read_file("model", "gpt3-175b", Transformer)
LLAMA3 = read_file("model", "llama3-70b", Transformer)
TINY = Transformer("tiny", 8, 64, 8, 8, 256, 1000, 32, 32)


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-175b", 174.6), ("llama3-70b", 70.55), ("llama2-70b", 68.98)]
)
def test_parameter_counts_are_the_known_ones(name, billions):
    model = read_file("model", name, Transformer)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_parameters_by_hand():
    norms, matrices = 2 * 64, 4 * 64 * 64 + 2 * 64 * 256
    assert TINY.parameters == 8 * (norms + matrices) + 2 * 1000 * 64 + 64
    biased = replace(TINY, biases=True, tied_embeddings=True, learned_positions=True)
    biases = 4 * 64 + 256 + 64 + 2 * 64
    tables = 1000 * 64 + 32 * 64
    assert biased.parameters == 8 * (norms + matrices + biases) + tables + 2 * 64


def test_operations_are_those_of_megatrons_formula():
    """Narayanan et al., appendix: 96 B s l h^2 (1 + s / 6h + V / 16 l h), a quarter again."""
    s, layers, h, vocab = 2048, 96, 12288, 51200
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert GPT3.flops_per_token == pytest.approx(formula, rel=1e-9)
    six_n = 6 * (GPT3.parameters - GPT3.sequence_length * h)
    attention = 12 * layers * s * h
    assert GPT3.flops_per_token == pytest.approx(six_n + attention, rel=1e-3)


def test_activations_are_those_of_korthikanti():
    b, s, h, a, t = 2, 2048, 12288, 96, 8
    layout = Layout(tensor=t, microbatch_size=b)
    expected = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer_activation_bytes(GPT3, layout) == pytest.approx(expected)
    both = replace(layout, sequence_parallel=True)
    expected = s * b * h / t * (34 + 5 * a * s / h)
    assert layer_activation_bytes(GPT3, both) == pytest.approx(expected)


def test_recomputation_keeps_less():
    one = Layout(stages=4)
    by_kind = [saved_bytes(GPT3, replace(one, recompute=k))[1] for k in ("none", "selective")]
    sbh = 2048 * 12288
    assert by_kind == [24 * sbh * (34 + 80), 24 * sbh * 34]
    assert saved_bytes(GPT3, replace(one, recompute="full"))[1] == 24 * 2 * sbh
    assert kept_bytes(GPT3, replace(one, recompute="full"))[1] == 24 * sbh * 34


def test_parameter_memory():
    """18 bytes per parameter in mixed precision, 12 of them divided among replicas."""
    whole = sum(parameter_bytes(TINY, Layout()))
    assert whole == 18 * TINY.parameters
    sharded = sum(parameter_bytes(TINY, Layout(data=4, shard_optimizer_state=True)))
    assert sharded == (6 + 12 / 4) * TINY.parameters
    assert sum(parameter_bytes(TINY, Layout(precision="fp32"))) == 16 * TINY.parameters


def test_a_tied_table_is_on_both_ends():
    tied = replace(TINY, tied_embeddings=True)
    sizes = parameter_bytes(tied, Layout(stages=2))
    assert sum(sizes) == 18 * (tied.parameters + tied.head_weights)


def test_key_value_heads_are_repeated_not_cut():
    keys_and_values = 2 * 8192 * 1024
    rest = LLAMA3.layer_weights - keys_and_values
    assert device_layer_weights(LLAMA3, 8) == LLAMA3.layer_weights / 8
    assert device_layer_weights(LLAMA3, 32) == rest / 32 + keys_and_values / 8


def test_layers_are_spread():
    assert spread_layers(GPT3, 8) == (12,) * 8
    assert spread_layers(replace(LLAMA3, layers=5), 4) == (2, 1, 1, 1)
    heavy = replace(TINY, vocab=100_000)
    assert spread_layers(heavy, 2) == (7, 1), "the head is worth many layers"
    for num_stages in range(1, 9):
        counts = spread_layers(TINY, num_stages)
        assert sum(counts) == 8 and min(counts) >= 1


def test_collectives_by_hand():
    device = replace(A100, node_latency_s=0.0, network_latency_s=0.0, achievable_link_share=1.0)
    assert device.all_reduce_s(8e9, 8) == pytest.approx(2 * 7 / 8 * 8e9 / 300e9)
    assert device.reduce_scatter_s(8e9, 16, stride=8) == pytest.approx(15 / 16 * 8e9 / 25e9)
    assert device.reduce_scatter_s(8e9, 16, stride=4) == pytest.approx(15 / 16 * 8e9 / 50e9)
    assert device.all_reduce_s(8e9, 1) == 0.0
    assert A100.message_s(0.0, crosses_nodes=True) == A100.network_latency_s


def test_what_crosses_nodes():
    inside = Work(GPT3, Layout(stages=4, tensor=2), A100)
    assert not inside.crosses_nodes(0, 3)
    assert Work(GPT3, Layout(stages=4, tensor=8), A100).crosses_nodes(0, 1)


def test_a_layer_by_hand():
    device = replace(A100, memory_bytes_per_s=1e30, achievable_flops_share=1.0)
    layer = Work(TINY, Layout(), device).layer
    weights = 2 * 32 * TINY.layer_weights / 312e12
    scores = 32 * TINY.attention_flops / 312e12
    assert layer.forward_s == pytest.approx(weights + scores)
    assert layer.input_gradient_s == pytest.approx(weights + 2 * scores)
    assert layer.weight_gradient_s == pytest.approx(weights)
    full = Work(TINY, Layout(recompute="full"), device).layer
    assert full.input_gradient_s == pytest.approx(2 * weights + 3 * scores)


BANDWIDTHS = (
    *("achievable_flops_share", "memory_bytes_per_s", "node_bytes_per_s", "network_bytes_per_s"),
)


@pytest.mark.parametrize("key", BANDWIDTHS)
def test_more_bandwidth_is_never_slower(key):
    model = replace(GPT3, layers=16, global_batch=16)
    for layout in (
        Layout(stages=4, tensor=8, data=2),
        Layout(stages=2, tensor=2, data=4, pipeline="zero_bubble", shard_optimizer_state=True),
        Layout(stages=4, tensor=4, stages_per_rank=2, recompute="full", sequence_parallel=True),
    ):
        faster = replace(A100, **{key: 1.5 * getattr(A100, key)})
        before, after = (predict(Work(model, layout, d)).step_s for d in (A100, faster))
        assert after <= before
        assert key != "achievable_flops_share" or after < before


class EqualStages(Work):
    """No ends, no messages, no exchange: only the schedule is left."""

    stages = property(lambda self: (Part(1.0, 1.0, 1.0),) * self.layout.num_stages)

    def exchange_s(self, stage):
        return 0.0

    update_s = exchange_s

    def transfer_s(self, source, target):
        return 0.0


@pytest.mark.parametrize(
    ("pipeline", "per_rank", "bubble"),
    [
        ("interleaved", 1, lambda p, m: (p - 1) / (m + p - 1)),
        ("simple", 1, lambda p, m: (p - 1) / (m + p - 1)),
        ("interleaved", 2, lambda p, m: (p - 1) / (2 * m + p - 1)),
        ("zero_bubble", 1, lambda p, m: (p - 1) / (3 * m + p - 1)),
    ],
)
def test_bubbles_of_equal_stages(pipeline, per_rank, bubble):
    for microbatches in (8, 40):
        layout = Layout(stages=4, pipeline=pipeline, stages_per_rank=per_rank)
        work = EqualStages(replace(TINY, global_batch=microbatches), layout, A100)
        assert predict(work).bubble == pytest.approx(bubble(4, microbatches))


@pytest.mark.parametrize(
    ("pipeline", "per_rank"),
    [
        *(("interleaved", 1), ("interleaved", 2), ("eager_1f1b", 1)),
        *(("zero_bubble", 1), ("zero_bubble_v", 2), ("simple", 1)),
    ],
)
@pytest.mark.parametrize("microbatches", [24, 31])
def test_long_steps_are_extended_from_short_ones(pipeline, per_rank, microbatches):
    model = replace(GPT3, layers=13, global_batch=microbatches)
    layout = Layout(stages=4, tensor=8, pipeline=pipeline, stages_per_rank=per_rank)
    costs = step_costs(Work(model, layout, A100))
    active = layout.candidate(microbatches).active_microbatches
    whole = Candidate(pipeline, per_rank, microbatches, active)
    exact = search(4, [whole], lambda _: costs)[0]
    found = simulated(layout, microbatches, costs)
    # Thirteen layers make the stages unequal; test_bubbles_of_equal_stages is exact.
    assert found.step_s == pytest.approx(exact.step_s, rel=0.025)
    assert found.bubble == pytest.approx(exact.bubble, abs=0.025)
    assert found.rank_bytes == exact.rank_bytes
    assert memory_of(layout, microbatches, costs) == exact.rank_bytes


def test_what_cannot_be_divided():
    layout = Layout(stages=16, tensor=7, data=5, microbatch_size=3)
    assert problems(layout, replace(LLAMA3, layers=8)) == [
        "64 heads cannot be divided among 7 tensor-parallel devices",
        "8 key-value heads can be neither divided among nor repeated on 7 tensor-parallel devices",
        "16 stages are more than the 8 layers",
        "a global batch of 1024 cannot be divided into microbatches of 3 on 5 replicas",
    ]
    with pytest.raises(ConfigError, match=r"Llama-3 70B as 1 x 3 x 1.* is impossible: 64 heads"):
        predict(Work(LLAMA3, Layout(tensor=3), A100))


def test_every_shipped_figure_has_a_source():
    folder = Path(mpxla.planning.__file__).parent
    for name in shipped("device"):
        values = tomllib.loads((folder / "devices" / f"{name}.toml").read_text())
        sources = values.pop("sources")
        assert (
            set(values) - {"name"}
            == set(sources)
            == {f.name for f in fields(DeviceModel)} - {"name"}
        )
        read_file("device", name, DeviceModel)
    for name in shipped("model"):
        assert tomllib.loads((folder / "models" / f"{name}.toml").read_text())["sources"]


def test_wrong_files(tmp_path):
    file = tmp_path / "model.toml"
    file.write_text(
        'name = "x"\nlayer = 2\nhidden = -1\nheads = true\nbiases = 1\nkv_heads = 1\nffn = 4\n'
        "vocab = 2.5\nsequence_length = 8\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_file("model", str(file), Transformer)
    assert str(caught.value).splitlines()[1:] == [
        "  - layer is not a key; did you mean layers?",
        "  - hidden = -1: write a whole number above zero",
        "  - heads = True: write a whole number above zero",
        "  - biases = 1: write true or false",
        "  - vocab = 2.5: write a whole number above zero",
        "  - layers is missing",
        "  - global_batch is missing",
    ]
    file.write_text("name = ")
    with pytest.raises(ConfigError, match=r"model\.toml cannot be read as TOML"):
        read_file("device", str(file), DeviceModel)
    with pytest.raises(ConfigError, match="no device model 'h20'; did you mean h200"):
        read_file("device", "h20", DeviceModel)


def test_published_figures_that_are_quick():
    """All others are in docs/planning.md; none of these is off by more than there."""
    rows = [row for row in published() if row.layouts[0].stages < 9 and row.device == "a100-80gb"]
    assert len(rows) == 11
    for row in rows:
        assert compare(row)[0] == pytest.approx(row.value, rel=0.12), row.name


@pytest.mark.slow
def test_published_figures_with_long_pipelines():
    rows = [row for row in published() if row.layouts[0].stages > 8]
    for row in rows:
        assert compare(row)[0] == pytest.approx(row.value, rel=0.12), row.name
