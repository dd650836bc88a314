"""Operators that the device has no code for: they run on the host between two pieces of a stage."""

import logging
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.testing import run_ranks, run_ranks_unpooled
from mpxla.tests.parity import Case, train, train_plainly
from mpxla.tests.parity_checks import assert_parity, assert_promises

pytestmark = pytest.mark.ranks

FORWARD = {
    "aten::_ctc_loss",
    "aten::_fft_c2r",
    "aten::_fft_r2c",
    "aten::cholesky_solve",
    "aten::grid_sampler_2d",
    "aten::linalg_cholesky_ex",
    "aten::median",
}
BACKWARD = {
    "aten::_cdist_backward",
    "aten::_ctc_loss_backward",
    "aten::grid_sampler_2d_backward",
    "aten::linalg_solve_triangular",
}


@pytest.mark.parametrize(
    "case",
    [
        Case("host", 1, 2),
        Case("host", 2, 4, "zero_bubble", manual=True),
        pytest.param(Case("host", 2, 3, "interleaved"), marks=pytest.mark.slow),
        pytest.param(Case("host", 2, 2, "simple", manual=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_that_of_plain_torch(case):
    ranks, plain = run_ranks(train, case.stages, case, timeout_s=200), train_plainly(case)
    assert_parity(ranks, plain)
    assert_promises(case, ranks)
