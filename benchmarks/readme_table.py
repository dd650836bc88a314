"""The table of speed in the documentation, from the results of the suite.

    python benchmarks/suite.py --json results.json
    python benchmarks/readme_table.py results.json docs/speed.md

Every number is the median of ratios that were taken within one repetition.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

MODELS = {
    "GPT, 17 M": "gpt, 8 microbatches",
    "GPT, 10 M": "half, 4 microbatches",
    "GPT, wide": "wide, 8 microbatches",
    "GPT, tiny": "tiny, 8 microbatches",
    "BERT": "bert, 8 microbatches",
    "ViT": "vit, 8 microbatches",
    "U-net": "unet, 8 microbatches",
}
ROWS = {
    "eager PyTorch, one rank": ("mpxla x1", "eager x1"),
    "lazily traced torch_xla, one rank": ("mpxla x1", "lazy_xla x1"),
    "`torch.distributed.pipelining`, two ranks": ("mpxla x2", "torch_pipelining x2"),
    "`torch.distributed.pipelining`, four ranks": ("mpxla x4", "torch_pipelining x4"),
    "DistributedDataParallel, two replicas": ("mpxla_replicas x2", "ddp x2"),
    "DistributedDataParallel x4, two replicas of two stages": ("mpxla_grid x4", "ddp x4"),
}
FIRST_CELL = "step time of mpxla, as a ratio to"


def cell(found: dict[str, Any], ours: str, theirs: str) -> str:
    """The median ratio, or what kept the peer from running."""
    if ours not in found or theirs not in found:
        return "-"
    if found[theirs]["error"]:
        return "it fails"
    pairs = zip(found[ours]["times_s"], found[theirs]["times_s"], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def table(results: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| {FIRST_CELL} | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for title, runs in ROWS.items():
        cells = [cell(results.get(name, {}), *runs) for name in MODELS.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def replace_table(page: str, lines: list[str]) -> str:
    """The page with these lines in the place of its table of speed."""
    old = page.splitlines()
    first = next(i for i, line in enumerate(old) if line.startswith(f"| {FIRST_CELL}"))
    end = next(i for i in range(first, len(old)) if not old[i].startswith("|"))
    return "\n".join([*old[:first], *lines, *old[end:]]) + "\n"


def main() -> None:
    """Rewrites the table in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what the suite wrote with --json")
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    lines = table(json.loads(args.results.read_text()))
    args.page.write_text(replace_table(args.page.read_text(), lines))


if __name__ == "__main__":
    main()
