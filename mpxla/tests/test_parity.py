"""Every model trains on several ranks with the numbers of plain PyTorch in one process.

The cases of the table cover all pairs of stages, microbatches, schedule, placement and speed, and
of the last three with every model. Some of them run by default, which cover every model and all
pairs of the other dimensions; the rest of the table is marked slow, and the full product long.
"""

from itertools import product

import pytest

from mpxla.tests.models import SUBJECTS
from mpxla.tests.parity import Case, Observed, Reference, train, train_plainly
from mpxla.tests.parity_checks import assert_parity, assert_promises
from mpxla.tests.ranks.run import run_ranks

NAMES = [*SUBJECTS, "gpt2", "llama", "bert"]

# Per model, each as "stages x microbatches", then S(imple) or I(nterleaved); m places by hand.
# What stands before the bar runs by default.
TABLE = {
    "mlp": "1x1I 4x5Im | 3x5S+",
    "conv_net": "1x3S+ | 2x2Im",
    "parameterless": "2x4I+ 3x3Im+ | 4x2S",
    "gpt": "2x1Sm | 3x2I+",
    "vit": "1x2I+ | 3x3Sm",
    "unet": "3x2S | 2x4Im+",
    "twice": "3x5I+ 2x2Sm",
    "nested": "4x4S+ | 2x1Im",
    "shared": "4x3I | 2x4Sm+",
    # The examples train such models by default.
    "gpt2": "| 2x2Sm 4x5I+",
    "llama": "| 2x4Im 3x2S+",
    "bert": "| 2x1Sm+ 3x3I",
}
PIPELINES = {"S": "simple", "I": "interleaved"}


def case_of(name: str, text: str) -> Case:
    keys = (("optimize", "speed"),) if text.endswith("+") else ()
    text = text.removesuffix("+")
    is_manual = text.endswith("m")
    stages, rest = text.removesuffix("m").split("x")
    return Case(name, int(stages), int(rest[:-1]), PIPELINES[rest[-1]], is_manual, keys)


def cases_of(rows: dict[str, str]) -> list[Case]:
    """Ordered so that processes are used again, and each reference is needed in one stretch."""
    cases = [case_of(name, text) for name, row in rows.items() for text in row.split()]
    return sorted(cases, key=lambda case: (case.stages, NAMES.index(case.subject)))


def default_cases() -> list[Case]:
    return cases_of({name: row.partition("|")[0] for name, row in TABLE.items()})


def covering_cases() -> list[Case]:
    return cases_of({name: row.replace("|", "") for name, row in TABLE.items()})


def all_cases() -> list[Case]:
    counts = {1: (1, 3), 2: (1, 2, 5), 3: (2, 3, 5), 4: (2, 4, 6)}
    automatic = [
        Case(name, stages, count, pipeline)
        for stages, name, pipeline in product(counts, NAMES, PIPELINES.values())
        for count in counts[stages]
    ]
    manual = [
        Case(name, stages, count, pipeline, True)
        for stages, name, pipeline in product((2, 3, 4), NAMES, PIPELINES.values())
        for count in counts[stages]
    ]
    return sorted({*automatic, *manual} - {*covering_cases()}, key=str)


def relation(case: Case) -> str:
    if case.microbatches == case.stages:
        return "equal"
    return "below" if case.microbatches < case.stages else "above"


def run(case: Case) -> tuple[list[Observed], Reference]:
    return run_ranks(train, case.stages, case, timeout_s=200), train_plainly(case)


@pytest.mark.unit
@pytest.mark.parametrize("cases", [default_cases(), covering_cases()], ids=["default", "table"])
def test_cases_cover_all_pairs(cases):
    assert {case.subject for case in cases} == set(SUBJECTS if cases == default_cases() else NAMES)
    traits = {
        "stages": lambda case: case.stages,
        "microbatches": relation,
        "pipeline": lambda case: case.pipeline,
        "placing": lambda case: case.manual,
        "speed": lambda case: bool(case.keys),
    }
    values = {
        "stages": {1, 2, 3, 4},
        "microbatches": {"below", "equal", "above"},
        "pipeline": {"simple", "interleaved"},
        "placing": {True, False},
        "speed": {True, False},
    }
    impossible = {(1, "below"), (1, True)}
    for first, second in product(traits, traits):
        if first < second:
            found = {(traits[first](case), traits[second](case)) for case in cases}
            pairs = set(product(values[first], values[second]))
            turned = {(b, a) for a, b in impossible}
            assert pairs - found - impossible - turned == set(), (first, second)
    if cases == default_cases():
        return
    for trait in ("pipeline", "placing", "speed"):
        found = {(case.subject, traits[trait](case)) for case in cases}
        assert set(product(NAMES, values[trait])) - found == set(), trait


@pytest.mark.ranks
@pytest.mark.parametrize("case", default_cases(), ids=str)
def test_trains_as_in_one_process(case):
    observed, reference = run(case)
    assert_parity(observed, reference)
    assert_promises(case, observed)


SLOW = sorted({*covering_cases()} - {*default_cases()}, key=str)
LONG = [pytest.param(case, marks=pytest.mark.long) for case in all_cases()]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", [*SLOW, *LONG], ids=str)
def test_trains_as_in_one_process_everywhere(case):
    observed, reference = run(case)
    assert_parity(observed, reference)
    assert_promises(case, observed)
