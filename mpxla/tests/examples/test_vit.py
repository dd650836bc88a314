"""The vision transformer on fake images: the same losses on any grid of stages and replicas."""

import contextlib
import io
import re
from argparse import Namespace

import pytest
import torch

from mpxla.tests.examples.running import (
    BFLOAT16_TOLERANCE,
    RELATIVE_TOLERANCE,
    load_beside,
    run_example,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

TINY = ("--steps", "4", "--warmup-steps", "1", "--batch-size", "8", "--image-size", "16")
TINY += ("--width", "16", "--layers", "1", "--heads", "2")


def check_against_plain(num_ranks, num_stages, *options, split=(), tolerance=RELATIVE_TOLERANCE):
    """Trains twice and compares; `split` are options of the split script only."""
    (expected,) = run_example("vit/train_plain.py", 1, *options)
    arguments = (*options, *split, "--stages", str(num_stages), "--microbatches", "2")
    for losses in run_example("vit/train.py", num_ranks, *arguments):
        assert losses == pytest.approx(expected, rel=tolerance)
    assert len(set(expected)) == len(expected), "training changes the loss"


@pytest.mark.slow
def test_two_stages():
    check_against_plain(2, 2, *TINY)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (4, 2)])
def test_other_grids(num_ranks, num_stages):
    check_against_plain(num_ranks, num_stages, *TINY)


@pytest.mark.slow
def test_bfloat16():
    check_against_plain(2, 2, *TINY, split=("--bf16",), tolerance=BFLOAT16_TOLERANCE)


def patches_and_convolution():
    """The example's patches, and those of the convolution with the same weights."""
    patches = load_beside("vit", "vit_model").PatchEmbedding(12, 4, 3, 5)
    convolution = torch.nn.Conv2d(3, 5, kernel_size=4, stride=4)
    convolution.weight.data = patches.proj.weight.data.view(5, 3, 4, 4)
    convolution.bias = patches.proj.bias
    images = torch.randn(2, 3, 12, 12)
    expected = convolution(images).flatten(2).transpose(1, 2)
    return patches(images).detach(), expected.detach()


def test_patches_are_those_of_a_convolution():
    ((patches, expected),) = run_ranks(patches_and_convolution, 1)
    torch.testing.assert_close(patches, expected)


def report(options, durations_s):
    """What the clock of the example prints."""
    model = load_beside("vit", "vit_model")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        model.print_mean(durations_s, Namespace(**options))
    return text.getvalue()


def test_mean_leaves_the_first_steps_out():
    options = {"batch_size": 8, "warmup_steps": 2}
    (text,) = run_ranks(report, 1, options, [10.0, 5.0, 1.0, 3.0])
    assert text == (
        "mean of 2 steps 2.000 s, 4.0 images/s; without the first 2, which took 15.0 s\n"
    )
    (text,) = run_ranks(report, 1, options, [10.0])
    assert re.match("no mean: all 1 steps are warm-up", text)
