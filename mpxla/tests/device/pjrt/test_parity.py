"""A part of the tests of parity, replicas, messages and checkpoints, on the PJRT backend.

`make test-pjrt` runs all of them on it. Here the ranks are always two, which are used again.
"""

import pytest
import torch

from mpxla.tests import parity, test_late_delivery, test_parity_replicas
from mpxla.tests.checkpoint.worlds import Run
from mpxla.tests.parity_checks import assert_parity, assert_promises
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_late_delivery import Tied, train_with_late_messages
from mpxla.tests.test_parity import case_of

pytestmark = pytest.mark.ranks

PJRT = {"MPXLA_DEVICE": "pjrt"}
CASES = [
    case_of("mlp", "2x2S+"),
    pytest.param(case_of("gpt", "2x2S+"), marks=pytest.mark.slow),
    pytest.param(case_of("unet", "2x3I"), marks=[pytest.mark.slow, pytest.mark.long]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_in_one_process(case):
    observed = run_ranks(parity.train, case.stages, case, timeout_s=200, env=PJRT)
    assert_parity(observed, parity.train_plainly(case))
    assert_promises(case, observed)


def test_split_backwards_train_as_in_one_process():
    case = parity.Case("mlp", 2, 4, "zero_bubble")
    observed = run_ranks(parity.train, case.stages, case, timeout_s=200, env=PJRT)
    assert_parity(observed, parity.train_plainly(case))


@pytest.mark.slow
def test_replicas_with_divided_updates_train_as_one_process():
    case = test_parity_replicas.Case("mlp", 2, 1, is_sharded=True, max_norm=0.1)
    observed = run_ranks(test_parity_replicas.train, case.world_size, case, env=PJRT)
    test_parity_replicas.assert_parity(case, observed, test_parity_replicas.train_plainly(case))
    test_parity_replicas.assert_little_state(case, observed)


@pytest.mark.slow
def test_changes_in_place_do_not_reach_messages_under_way():
    expected, weights = test_late_delivery.plain(Tied)
    for seen, state in run_ranks(train_with_late_messages, 2, Tied, 3, env=PJRT):
        torch.testing.assert_close(seen, expected)
        torch.testing.assert_close(dict(state), dict(weights))


# --- checkpoints --------------------------------------------------------------------------------


def save_in_mid_run(path):
    run = Run(stages=2)
    run.train(2)
    run.save(path, "two")
    return run.train(2)


def resume(path):
    run = Run(stages=2, seed=91)
    run.resume(path)
    return run.train(2)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["torch_xla", "pjrt"])
def test_a_run_goes_on_on_the_other_backend(writer, tmp_path):
    first, second = (PJRT, {}) if writer == "pjrt" else ({}, PJRT)
    expected, _ = run_ranks(save_in_mid_run, 2, str(tmp_path), env=first)
    for losses in run_ranks(resume, 2, str(tmp_path), env=second):
        assert losses == pytest.approx(expected, rel=2e-5)
