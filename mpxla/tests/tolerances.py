"""How close float32 results of the pipeline and of plain PyTorch have to be.

XLA and PyTorch add in other orders, so results differ by rounding. Every figure says what it bounds
and about how much of it is used; none is to be raised without a reason beside it.
"""

from collections.abc import Mapping

import torch

__all__ = ["GRADIENT", "LOSS", "OUTPUT", "PARAMETER", "ROUNDING", "assert_close_by_norm"]

LOSS = 3e-5
"""Relative, for each of 10 AdamW steps. They divide by the root of squared gradients, some of which
are rounding themselves: a ViT reaches 0.98e-5 on Intel's processors, and 1.01e-5 now and then."""

GRADIENT = 1e-5
"""Of one step: largest difference in units of the largest gradient of that parameter."""

PARAMETER = 1e-5
"""After 10 SGD steps: largest difference in units of the parameter's largest element."""


OUTPUT = 1e-5
"""Of what a step returns: largest difference in units of the tensor's largest element."""

ROUNDING = 1e-2
"""Tensors with no larger element count as if they had this one: the gradient of a bias before batch
norm, or of attention keys, is zero in exact arithmetic and rounding here (up to 2e-8)."""


def assert_close_by_norm(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
    floor: float = 0.0,
) -> None:
    """Asserts that tensors are equal up to `tolerance` times each one's largest element.

    Args:
        actual: tensors by name.
        expected: the same names.
        tolerance: largest difference, relative to the largest element of the expected tensor.
        floor: smallest magnitude that counts as largest element; below it, values are rounding.
    """
    assert sorted(actual) == sorted(expected)
    wrong = []
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        if not want.is_floating_point():
            if not torch.equal(got, want):
                wrong.append(f"{name}: {got} is not {want}")
            continue
        scale = max(want.abs().max().item(), floor)
        difference = (got - want).abs().max().item()
        if not difference <= tolerance * scale:
            wrong.append(f"{name}: differs by {difference:.3g} where the largest is {scale:.3g}")
    assert not wrong, "\n".join(wrong)
