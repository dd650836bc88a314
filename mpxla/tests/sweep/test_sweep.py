"""torch's operator samples in compiled steps: right, on the host, or refused with a reason."""

import pytest

from mpxla.tests.sweep.operators import Status
from mpxla.tests.sweep.samples import operator_names
from mpxla.tests.sweep.table import SAMPLES, TABLE, by_operator, sweep, table

pytestmark = pytest.mark.ranks

FAST = "amax index_put kthvalue linalg.inv_ex nn.functional.cross_entropy".split()


def bugs(outcomes):
    return [
        f"{outcome.case}: {outcome.text}"
        for outcome in outcomes
        if outcome.status in (Status.RAW, Status.WRONG)
    ]


@pytest.mark.slow
def test_some_operators():
    outcomes = list(sweep(FAST, 1))
    assert not bugs(outcomes)
    assert {outcome.status for outcome in outcomes} <= {Status.PASSED, Status.HOST}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_all_operators_and_the_page_about_them():
    outcomes = list(sweep(operator_names(), SAMPLES))
    assert not bugs(outcomes)
    page = table(by_operator(outcomes), SAMPLES)
    assert TABLE.read_text() == page, f"python -m mpxla.tests.sweep.table writes {TABLE} anew"
