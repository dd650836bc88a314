"""`python -m mpxla plan --model`: a step on paper, on devices that nobody has yet."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from mpxla.errors import ConfigError, MpxlaError
from mpxla.planning.device import DeviceModel
from mpxla.planning.explore import Space, explore
from mpxla.planning.files import read_file, shipped
from mpxla.planning.layout import PRECISIONS, RECOMPUTATIONS, Layout
from mpxla.planning.predict import Prediction, predict
from mpxla.planning.transformer import Transformer
from mpxla.planning.work import Work
from mpxla.tables import table

__all__ = ["paper_options", "parse_devices", "run_on_paper"]


def paper_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of paper studies."""
    group = parser.add_argument_group(
        "on paper", "predict a transformer from its sizes, with --model instead of a factory"
    )
    names = {kind: ", ".join(shipped(kind)) for kind in ("model", "device")}
    group.add_argument("--model", metavar="MODEL", help=f"{names['model']}, or a TOML file")
    group.add_argument("--device-model", metavar="DEVICE", help=f"{names['device']}, or a file")
    group.add_argument("--devices", metavar="N", help="such as 64, 64,96 or 64..1024 (doubling)")
    group.add_argument("--global-batch", type=int, metavar="B", help="sequences of a step")
    group.add_argument("--recompute", choices=RECOMPUTATIONS, default="none")
    group.add_argument("--shard-state", action="store_true", help="shard_optimizer_state")
    group.add_argument(
        "--sequence-parallel", action="store_true", help="tensor parallelism divides norms, too"
    )
    group.add_argument("--precision", choices=list(PRECISIONS), default="mixed")


def parse_devices(text: str) -> list[int]:
    """Numbers of devices: a list, or a range that doubles.

    Raises:
        ConfigError: it is neither.
    """
    first, dots, last = text.partition("..")
    numbers = [first, last] if dots else text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--devices {text}: write a number, 64,96 or 64..1024.")
    counts = [int(number) for number in numbers]
    if not dots:
        return counts
    found = [counts[0]]
    while 2 * found[-1] <= counts[1]:
        found.append(2 * found[-1])
    return found


def run_on_paper(options: argparse.Namespace) -> None:
    """Prints predictions, one block per number of devices."""
    missing = [
        name
        for name, value in (
            ("--device-model", options.device_model),
            ("--devices", options.devices),
        )
        if value is None
    ]
    if missing:
        raise ConfigError(f"--model needs {' and '.join(missing)} as well.")
    if options.search and (options.stages, options.tp) != (None, None):
        raise ConfigError(
            "--search of a model on paper tries all numbers of stages and of tensor-parallel "
            "devices. Leave out --stages and --tp, or --search."
        )
    model = read_file("model", options.model, Transformer)
    device = read_file("device", options.device_model, DeviceModel)
    if options.memory_limit is not None:
        limit = options.memory_limit * 2**30 / device.memory_bytes
        device = replace(device, usable_memory_share=limit)
    if options.global_batch is not None:
        model = replace(model, global_batch=options.global_batch)
    print(_header(model, device))
    show = _search if options.search else _one
    for count in parse_devices(options.devices):
        print(f"\n{count} devices:")
        try:
            show(options, model, device, count)
        except MpxlaError as error:
            if len(parse_devices(options.devices)) == 1:
                raise
            print(f"  {error}")
    print(_closing())


def _header(model: Transformer, device: DeviceModel) -> str:
    return (
        f"{model.name}: {model.parameters / 1e9:.1f} billion parameters, "
        f"{model.flops_per_token / 1e9:.0f} GFLOP per token, {model.global_batch} sequences of "
        f"{model.sequence_length} tokens per step\n"
        f"{device.name}: {device.usable_bytes / 1e9:.3g} GB usable, products at "
        f"{100 * device.achievable_flops_share:.0f} % of the peak"
    )


def _one(
    options: argparse.Namespace, model: Transformer, device: DeviceModel, num_devices: int
) -> None:
    """Predicts the layout that the options name."""
    data, rest = divmod(num_devices, options.stages * options.tp)
    if rest or not data:
        raise ConfigError(
            f"{num_devices} devices cannot be divided into {options.stages} stages x {options.tp} "
            "tensor-parallel devices. Change --stages or --tp."
        )
    size, rest = divmod(model.global_batch, data * options.microbatches)
    if rest or not size:
        raise ConfigError(
            f"a global batch of {model.global_batch} cannot be divided into "
            f"{options.microbatches} microbatches on {data} replicas. Change --microbatches or "
            "--global-batch."
        )
    pipeline = options.pipeline or "interleaved"
    virtual = options.virtual or (2 if pipeline == "zero_bubble_v" else 1)
    layout = Layout(
        stages=options.stages,
        tensor=options.tp,
        data=data,
        microbatch_size=size,
        pipeline=pipeline,
        stages_per_rank=virtual,
        recompute=options.recompute,
        shard_optimizer_state=options.shard_state,
        sequence_parallel=options.sequence_parallel,
        precision=options.precision,
        active_microbatches=options.active,
    )
    found = predict(Work(model, layout, device))
    print(_table([found]))
    print(_memory(found))
    if max(found.rank_bytes) > device.usable_bytes:
        raise ConfigError(
            f"pipeline rank {found.fullest} needs {max(found.rank_bytes) / 1e9:.3g} GB, more than "
            f"the {device.usable_bytes / 1e9:.3g} GB of a device. Try --search, --recompute full, "
            "--shard-state or more stages."
        )


def _search(
    options: argparse.Namespace, model: Transformer, device: DeviceModel, num_devices: int
) -> None:
    """Prints the best layouts."""
    space = Space(
        sequence_parallel=options.sequence_parallel,
        precision=options.precision,
    )
    found = explore(model, device, num_devices, space)
    print(_table(found.best))
    print(f"  best of {found.num_layouts} layouts; {found.num_simulated} had to be simulated")
    print(_memory(found.best[0]))


def _table(found: Sequence[Prediction]) -> str:
    rows = [("step, s", "sequences/s", "TFLOP/s", "of peak", "bubble", "fullest, GB", "layout")]
    for each in found:
        rows.append(
            (
                f"{each.step_s:.4g}",
                f"{each.sequences_per_s:.4g}",
                f"{each.flops_per_s / 1e12:.1f}",
                f"{100 * each.peak_share:.1f} %",
                f"{100 * each.bubble:.1f} %",
                f"{max(each.rank_bytes) / 1e9:.1f}",
                str(each.layout),
            )
        )
    return "\n".join(table(rows))


def _memory(found: Prediction) -> str:
    fixed = found.fixed_bytes[found.fullest]
    saved = found.rank_bytes[found.fullest] - fixed
    return (
        f"  memory of pipeline rank {found.fullest}: {fixed / 1e9:.1f} GB of parameters, optimizer "
        f"state and working memory, {saved / 1e9:.1f} GB of activations; "
        f"{found.num_microbatches} microbatches"
    )


def _closing() -> str:
    return (
        "\nLayouts are stages x tensor x data. A prediction, not a measurement: assumptions and "
        "errors are in docs/planning.md.\nmpxla has all features of these layouts; which devices "
        "it runs on is in docs/supported.md."
    )
