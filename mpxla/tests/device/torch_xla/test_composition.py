"""Operators that torch_xla cannot lower, or has no derivative of: as in plain PyTorch."""

import functools

import pytest
import torch
import torch.nn.functional as F

from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@torch.library.custom_op("mpxla_test::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """An operator of a user, in NumPy: it cannot be traced."""
    return torch.from_numpy(x.detach().cpu().numpy() * 0.5)


halves.register_fake(torch.empty_like)
halves.register_autograd(lambda context, gradient: halves(gradient))


def symmetric(h):
    return h @ h.T + 4 * torch.eye(4)


def ctc(targets, lengths):
    def loss(h):
        logits = h.view(4, 1, 6).expand(4, 2, 6).log_softmax(-1)
        return F.ctc_loss(logits, targets, torch.tensor([4, 4]), lengths)

    return loss


def transform(**options):
    return lambda h: torch.view_as_real(
        torch.stft(h.flatten(), 8, return_complex=True, **options)
    ).square()


def image(h):
    return h.view(1, 1, 4, 6)


SAMPLES = {
    # Composed by PyTorch, and computed as one by torch_xla: gradients would be zero.
    "cross": lambda h: torch.cross(h[:, :3], h[:, 3:], dim=1) * torch.arange(3),
    "std": lambda h: h.std() + h.std(1).square().sum(),
    "logdet": lambda h: torch.logdet(symmetric(h)),
    "svd": lambda h: torch.svd(h)[1],
    # Their derivatives of torch_xla fail on fake tensors.
    "max_pool3d": lambda h: F.max_pool3d(h.view(1, 1, 4, 2, 3), 2, stride=1),
    "dilated": lambda h: F.max_pool2d(image(h), 2, dilation=2),
    # Raw errors of torch_xla.
    "cummax": lambda h: h.cummax(1).values * h,
    "unpool": lambda h: F.max_unpool2d(*F.max_pool2d(image(h), 2, return_indices=True), 2),
    "slogdet": lambda h: torch.linalg.slogdet(symmetric(h))[1],
    "repeat": lambda h: torch.repeat_interleave(h, torch.tensor([1, 2, 1, 1]), 0, output_size=5),
    "stft": transform(hop_length=4, window=torch.hann_window(8)),
    "stft_plain": transform(win_length=6, center=False, normalized=True),
    "stft_two_sided": transform(window=torch.hann_window(4), win_length=4, onesided=False),
    # On the host.
    "ctc_rows": ctc(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([2, 1])),
    "ctc_concatenated": ctc(torch.tensor([1, 2, 3]), torch.tensor([2, 1])),
    "bag": lambda h: F.embedding_bag(torch.tensor([0, 1, 2, 3]), h, torch.tensor([0, 3])),
    "bag_maximum": lambda h: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), h, mode="max"),
    "solve": lambda h: torch.linalg.solve(symmetric(h), h),
    "least_squares": lambda h: torch.linalg.lstsq(h.T, torch.ones(6, 1)).solution,
    "qr": lambda h: torch.linalg.qr(h.T)[1].square(),
    "spectrum": lambda h: (torch.fft.fft2(h) * (0.5 + 2j)).abs(),
    "logit": lambda h: torch.logit(h, eps=0.1) + torch.logit(h.sigmoid()),
    "polar": lambda h: torch.view_as_real(torch.polar(h.exp(), h)),
    "median": lambda h: h.nanmedian() + h.median(0).values * h,
    "cells": lambda h: torch.bucketize(h.detach(), torch.tensor([-1.0, 0, 1])) * h,
    "pooled": lambda h: F.adaptive_max_pool2d(image(h), (3, 4)),
    "of_a_user": lambda h: halves(h.exp()),
    "lgamma": lambda h: torch.lgamma(h.exp()) + torch.polygamma(1, h.exp()),
}
ON_DEVICE = (
    *("std", "svd", "max_pool3d", "cummax", "unpool"),
    *("cross", "median", "cells", "pooled", "logdet", "slogdet", "solve", "dilated"),
    *("repeat", "bag", "bag_maximum", "logit"),
)


RELATIVES = ("bag", "ctc_concatenated", "least_squares", "logdet", "stft", "stft_plain")
"""Of samples that the default tier has."""
EACH = [pytest.param(n, marks=[pytest.mark.slow] * (n in RELATIVES)) for n in SAMPLES]


def run_all(names):
    from mpxla.tests.stage.single import differences

    found = {}
    for name in names:
        try:
            found[name] = differences(SAMPLES[name])
        except Exception as error:
            found[name] = ([float("inf")], f"{type(error).__name__}: {error}")
    return found


@functools.cache
def results_of(is_slow):
    """Of all samples of a tier, which one process computes."""
    names = [name for name in SAMPLES if (name in RELATIVES) == is_slow]
    (found,) = run_ranks(run_all, 1, names, timeout_s=300)
    return found


@pytest.mark.parametrize("name", EACH)
def test_operator_gives_the_numbers_of_plain_torch(name):
    errors, operators = results_of(name in RELATIVES)[name]
    assert max(errors) < 3e-5, (errors, operators)
    assert (name in ON_DEVICE) == (operators == ())


def test_rules_are_taken_out_again():
    from torch._subclasses import fake_impls

    from mpxla.device.torch_xla.operators.composition import composed_derivatives, host_shapes
    from mpxla.graph.shapes import static_shapes

    std = torch.ops.aten.std.default
    tables = (std.py_kernels, fake_impls.op_implementations_dict)
    before = [dict(table) for table in tables], list(fake_impls.op_implementations_checks)
    with pytest.raises(KeyError), composed_derivatives(), host_shapes(), static_shapes():
        assert torch._C.DispatchKey.AutogradXLA in std.py_kernels
        raise KeyError
    assert ([dict(table) for table in tables], fake_impls.op_implementations_checks) == before
