"""The peak of resident memory that scripts read as CUDA's."""

import pytest

from mpxla.compat.memory import ResidentPeak

pytestmark = pytest.mark.unit


def test_a_peak_stays_where_linux_counts_less_the_next_time():
    peak = ResidentPeak()
    assert [peak.read(counted) for counted in (50, 48, 60, 59)] == [50, 50, 60, 60]


def test_a_peak_starts_anew():
    peak = ResidentPeak()
    peak.read(60)
    peak.reset()
    assert peak.read(40) == 40
