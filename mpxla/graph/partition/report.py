"""The partition as a table for people: what every stage holds and does, and how even it is.

Returns text; printing or logging it is the caller's business. This module must not know how a
partition is found.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence

from mpxla.graph.partition.modules import PART_MARK
from mpxla.graph.partition.words import Partition

__all__ = ["format_report", "format_size"]

HEADER = (
    *("stage", "rank", "modules", "parameters", "split", "gradients+state"),
    *("compute", "FLOPs", "activations", "cut"),
)
MODULES_COLUMN = HEADER.index("modules")
GAP = "  "
MODULES_WIDTH = 48
"""Characters after which the list of modules continues on the next line."""
UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_report(
    partition: Partition,
    *,
    flops: Sequence[int],
    in_flight: Sequence[int],
    weight_bytes: Mapping[str, int],
    split: Collection[str],
) -> str:
    """Write the partition as an aligned table.

    Args:
        partition: What to show.
        flops: Floating-point operations of every node, forward and backward.
        in_flight: Microbatches of which every stage holds activations at a time.
        weight_bytes: Of every parameter, the weights alone; what the partition counts beside them,
            gradients and an optimizer's state, has a column of its own.
        split: Names of parameters of which a rank has a part only, by tensor parallelism; a column
            counts them if there are any.

    Returns:
        Lines of text: a row per stage (operations and bytes over the stage's cuts per microbatch,
        activations as microbatches in flight times those of one, or "-" where no node says what it
        saves), then the balance, and where they occur tied parameters and idle ranks.
    """
    total_s = sum(load.compute_s for load in partition.loads) or 1.0
    by_stage = _flops_by_stage(partition, flops)
    is_weighed = any(load.activation_bytes for load in partition.loads)
    rows: list[tuple[str, ...]] = [HEADER]
    for load in partition.loads:
        modules = textwrap.wrap(
            ", ".join(load.modules) or "-",
            MODULES_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
        weights = sum(weight_bytes[name] for name in load.parameters)
        saved = f"{in_flight[load.stage]} x {format_size(load.activation_bytes)}"
        row = (
            str(load.stage),
            str(load.rank),
            modules[0],
            f"{len(load.parameters)} ({format_size(weights)})",
            str(len(set(load.parameters) & set(split))),
            format_size(load.parameter_bytes - weights),
            f"{100 * load.compute_s / total_s:.1f} %",
            f"{by_stage[load.stage]:.3g}",
            saved if is_weighed else "-",
            format_size(load.cut_bytes),
        )
        rows.append(row)
        rows.extend(("", "", line, *[""] * (len(HEADER) - 3)) for line in modules[1:])
    if not split:
        place = HEADER.index("split")
        rows = [row[:place] + row[place + 1 :] for row in rows]
    return "\n".join(["Partition assignments:", *_aligned(rows), *_notes(partition, in_flight)])


def _flops_by_stage(partition: Partition, flops: Sequence[int]) -> list[int]:
    total = [0] * partition.num_stages
    for node, count in enumerate(flops):
        for stage in partition.stages_of(node):
            total[stage] += count
    return total


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(
            cell.ljust(width) if place == MODULES_COLUMN else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _notes(partition: Partition, in_flight: Sequence[int]) -> list[str]:
    compute = [0.0] * partition.num_ranks
    memory = partition.rank_bytes(partition.parameter_bytes)
    for load in partition.loads:
        compute[load.rank] += load.compute_s
        memory[load.rank] += in_flight[load.stage] * load.activation_bytes
    notes = [
        f"balance of the ranks (largest / mean): compute {_balance(compute):.2f}, "
        f"memory {_balance(memory):.2f}"
    ]
    tied = {name: ranks for name, ranks in partition.parameter_ranks.items() if len(ranks) > 1}
    if tied:
        places = (f"{name} on ranks {', '.join(map(str, ranks))}" for name, ranks in tied.items())
        notes.append(f"parameters held by several ranks: {'; '.join(places)}")
    if partition.idle_ranks:
        notes.append(f"ranks without a stage: {', '.join(map(str, partition.idle_ranks))}")
    if any(name.endswith(PART_MARK) for load in partition.loads for name in load.modules):
        notes.append(f"{PART_MARK} = a part of the module's operations")
    return notes


def _balance(amounts: Sequence[float]) -> float:
    total = sum(amounts)
    return max(amounts) * len(amounts) / total if total else 1.0


def format_size(num_bytes: int) -> str:
    """Writes a size with three significant digits: 0 B, 999 B, 1.5 KiB, 12 MiB."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size, unit = num_bytes / 1024, 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {UNITS[unit]}"
