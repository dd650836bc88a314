"""Measurements that others published, beside what the planner predicts for the same step.

python -m mpxla.tests.planning.published     prints the table of docs/planning.md
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpxla.planning.device import DeviceModel
from mpxla.planning.files import read_file
from mpxla.planning.layout import Layout
from mpxla.planning.predict import Prediction, predict
from mpxla.planning.transformer import Transformer
from mpxla.planning.work import Work

__all__ = ["Published", "compare", "format_row", "published"]

NARAYANAN = "Narayanan et al., SC 2021"
KORTHIKANTI = "Korthikanti et al., 2022, table 5"


@dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
        source: the publication.
        name: of the run.
        model: what was trained.
        device: name of the device model.
        layouts: how, as far as it was said; the best that fits counts.
        value: the figure.
        unit: "s" per step, "TFLOP/s" per device with what is computed again, or "sequences/s".
    """

    source: str
    name: str
    model: Transformer
    device: str
    layouts: tuple[Layout, ...]
    value: float
    unit: str


def published() -> Iterator[Published]:
    """All figures."""
    yield from _weak_scaling()
    yield from _gpt3_strong_scaling()
    yield from _recomputation()
    yield from _neuron()


def compare(row: Published) -> tuple[float, Prediction]:
    """The predicted figure, and the whole prediction, of the fastest layout that fits."""
    device = read_file("device", row.device, DeviceModel)
    found = [predict(Work(row.model, layout, device)) for layout in row.layouts]
    fitting = [f for f in found if max(f.rank_bytes) <= device.usable_bytes]
    best = min(fitting or found, key=lambda f: f.step_s)
    if row.unit == "s":
        return best.step_s, best
    if row.unit == "sequences/s":
        return best.sequences_per_s, best
    return best.flops_per_s * _with_recomputation(row.model) / 1e12, best


def format_row(row: Published) -> str:
    """A line of the table in the documentation."""
    value, best = compare(row)
    layout = best.layout
    how = f"{layout.stages} x {layout.tensor} x {layout.data}"
    error = 100 * (value / row.value - 1)
    return (
        f"| {row.source} | {row.name} | {how} | {row.value:g} {row.unit} | {value:.4g} "
        f"| {error:+.1f} % |"
    )


def _weak_scaling() -> Iterator[Published]:
    """Table 1: full recomputation; microbatch sizes are not in it."""
    rows = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
        ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
    for name, heads, hidden, layers, tensor, stages, devices, batch, tflops in rows:
        data = devices // tensor // stages
        layouts = tuple(
            Layout(stages, tensor, data, size, recompute="full")
            for size in (1, 2, 4, 8, 16)
            if batch % (data * size) == 0
        )
        model = _gpt(heads, hidden, layers, batch)
        source = f"{NARAYANAN}, table 1"
        yield Published(source, f"GPT {name}", model, "a100-80gb", layouts, tflops, "TFLOP/s")


def _gpt3_strong_scaling() -> Iterator[Published]:
    """Table 2, the rows of 8 tensor x 12 pipeline ranks."""
    for devices, tflops in ((384, 153), (768, 149), (1536, 141)):
        layouts = (Layout(12, 8, devices // 96, recompute="full"),)
        model = read_file("model", "gpt3-175b", Transformer)
        name, source = f"GPT-3 174.6B, {devices} GPUs", f"{NARAYANAN}, table 2"
        yield Published(source, name, model, "a100-80gb", layouts, tflops, "TFLOP/s")


def _recomputation() -> Iterator[Published]:
    """Full recomputation, and selective with sequence parallelism."""
    rows = (
        ("22B", 64, 6144, 48, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 512, 1, 1, 94.42, 71.49),
    )
    for name, heads, hidden, layers, stages, batch, size, per_rank, full_s, selective_s in rows:
        model = _gpt(heads, hidden, layers, batch)
        layout = Layout(stages, 8, 1, size, stages_per_rank=per_rank, recompute="full")
        selective = replace(layout, recompute="selective", sequence_parallel=True)
        for each, value in ((layout, full_s), (selective, selective_s)):
            title = f"GPT {name}, {each.recompute}"
            yield Published(KORTHIKANTI, title, model, "a100-80gb", (each,), value, "s")


def _neuron() -> Iterator[Published]:
    """One figure, of which neither sequence length nor layout is at hand: two readings."""
    source, name = "AWS, NxD on 32 trn1.32xlarge", "Llama 70B"
    for kind, stages, tensor in (("llama2-70b", 8, 8), ("llama3-70b", 8, 32)):
        model = read_file("model", kind, Transformer)
        layout = Layout(
            stages,
            tensor,
            1024 // stages // tensor,
            recompute="full",
            shard_optimizer_state=True,
            sequence_parallel=True,
        )
        title = f"{name}, read as {model.sequence_length} tokens"
        layouts = (layout, replace(layout, recompute="none"))
        yield Published(source, title, model, "trn1", layouts, 7.94, "sequences/s")


def _gpt(heads: int, hidden: int, layers: int, batch: int) -> Transformer:
    base = read_file("model", "gpt3-175b", Transformer)
    return replace(
        base,
        name=f"GPT of {layers} layers",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        global_batch=batch,
    )


def _with_recomputation(model: Transformer) -> float:
    """Operations that count in the paper, where layers run forward twice, over the model's."""
    again = model.layers * (2 * model.layer_weights + model.attention_flops)
    return 1 + again / model.flops_per_token


if __name__ == "__main__":
    for line in published():
        print(format_row(line), flush=True)
