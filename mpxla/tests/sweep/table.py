"""Runs torch's operator samples through compiled steps and writes `docs/operators.md`.

    PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0 python -m mpxla.tests.sweep.table

A new process takes over where one has met an error that is none of mpxla's: such an error may leave
the device unusable.
"""

import argparse
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mpxla.tests.ranks.run import RankError, run_ranks
from mpxla.tests.sweep.operators import Outcome, Status, try_case
from mpxla.tests.sweep.samples import cases_of, operator_names

__all__ = ["outcomes_of", "sweep", "table"]

TABLE = pathlib.Path(__file__).parents[3] / "docs" / "operators.md"
SAMPLES = 2
"""Samples of every operator."""

CHUNK = 20
"""Operators for one call of a process."""

_ORDER = (Status.SKIPPED, Status.PASSED, Status.HOST, Status.REFUSED, Status.RAW, Status.WRONG)
_TITLES = {
    Status.PASSED: "the numbers of plain PyTorch, and its gradients",
    Status.HOST: "the same; computed on the host between two programs of a stage",
    Status.REFUSED: "an error of mpxla's that says what to do",
    Status.RAW: "an error that is none of mpxla's: a bug",
    Status.WRONG: "other numbers without a word: a bug",
    Status.SKIPPED: "the sample fails in plain PyTorch, or has tensors without elements",
}
_HEAD = """# Operators

Generated: `PJRT_DEVICE=CPU python -m mpxla.tests.sweep.table`

torch's own samples of each operator (`torch.testing._internal.common_methods_invocations`, float32;
{samples} of each, on one and on two stages), captured, compiled, run and differentiated, against
plain PyTorch. Random values are compared in shape and dtype only. An operator counts as its worst
sample.
"""


def outcomes_of(names: Sequence[str], samples: int) -> tuple[list[str], list[Outcome]]:
    """Tries operators in this process, on one rank.

    Args:
        names: of operators.
        samples: how many of each.

    Returns:
        Names that are left because an error may have spoiled the process, and what was found.
    """
    found: list[Outcome] = []
    for position, name in enumerate(names):
        for case in cases_of(name, samples):
            found.append(try_case(case, 1))
            if found[-1].status in (Status.PASSED, Status.HOST):
                found.append(try_case(case, 2))
        if any(outcome.status is Status.RAW for outcome in found):
            return list(names[position + 1 :]), found
    return [], found


def sweep(names: Sequence[str], samples: int) -> Iterator[Outcome]:
    """What comes of all samples, operator by operator."""
    waiting = [list(names[i : i + CHUNK]) for i in range(0, len(names), CHUNK)]
    number = 0
    while waiting:
        part = waiting.pop(0)
        environment = {"MPXLA_SWEEP": str(number)}  # the same processes as long as it is the same
        try:
            ((left, found),) = run_ranks(
                outcomes_of, 1, part, samples, timeout_s=3600, env=environment
            )
        except RankError as error:
            if len(part) > 1:  # one by one, to learn which one ends the process
                waiting = [[name] for name in part] + waiting
                continue
            left, found = [], [Outcome(f"{part[0]}[]", Status.RAW, str(error).partition("\n")[0])]
        number += any(outcome.status is Status.RAW for outcome in found)
        waiting = [left, *waiting] if left else waiting
        yield from found


def by_operator(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The worst outcome of every operator."""
    grouped: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        grouped[outcome.case.partition("[")[0]].append(outcome)
    return {
        name: max(grouped[name], key=lambda outcome: _ORDER.index(outcome.status))
        for name in sorted(grouped)
    }


def table(worst: Mapping[str, Outcome], samples: int) -> str:
    """The page: counts, then one line for every operator that did not simply pass."""
    counts = Counter(outcome.status for outcome in worst.values())
    lines = [_HEAD.format(samples=samples), "| result | operators | meaning |", "|---|---|---|"]
    lines += [f"| {s} | {counts[s]} | {_TITLES[s]} |" for s in _TITLES if counts[s]]
    for status in _TITLES:
        names = [name for name, outcome in worst.items() if outcome.status is status]
        if not names:
            continue
        lines += ["", f"## {status}", ""]
        if status in (Status.PASSED, Status.SKIPPED):
            lines += [f"- `{name}`" for name in names]
        else:
            lines += [f"- `{name}`: {_short(worst[name].text)}" for name in names]
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    """Without the places in this folder's own files, which say nothing about the operator."""
    text = text.partition(" in model.calls")[0].replace("|", "/")
    start, marker, end = text.partition(" at /")
    if marker:
        text = start + ": " + end.rpartition(": ")[2]
    return text[:160]


def main() -> None:
    """Runs the sweep and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--output", type=pathlib.Path, default=TABLE)
    parser.add_argument("operators", nargs="*", help="all of them by default")
    arguments = parser.parse_args()
    found: list[Outcome] = []
    for outcome in sweep(arguments.operators or operator_names(), arguments.samples):
        print(f"{outcome.status:8} {outcome.case} {outcome.text}", flush=True)
        found.append(outcome)
    arguments.output.write_text(table(by_operator(found), arguments.samples))


if __name__ == "__main__":
    main()
