"""Architectures of transformers in two stages against plain PyTorch: all, and a fast sample."""

import pytest

from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks

SAMPLE = ["gpt2", "bert", "opt", "llama"]
GROUP = 8
"""Architectures for each start of a process, so that a busy machine has time enough for them."""


def tried(names):
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.tests.architectures import outcomes

    current_device()
    return outcomes(names)


def test_a_sample_trains():
    (found,) = run_ranks(tried, 1, SAMPLE, timeout_s=300)
    assert found == dict.fromkeys(SAMPLE, ("passed", ""))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_architecture_trains_wrong_numbers():
    from mpxla.tests.architectures import architectures

    names = list(architectures())
    found = {}
    for first in range(0, len(names), GROUP):
        (part,) = run_ranks(tried, 1, names[first : first + GROUP], timeout_s=3600)
        found.update(part)
    wrong = {name: why for name, (result, why) in found.items() if result == "different"}
    assert wrong == {}
    assert sum(result == "passed" for result, _ in found.values()) >= 60
