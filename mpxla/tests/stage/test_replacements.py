"""What stands for an operator gives what that gives."""

import pytest
import torch

from mpxla.stage.replacements import SHARED

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_weight_has_one_length_for_each_place_of_a_dimension_or_for_all(dim):
    direction = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    length = torch.norm_except_dim(direction, 2, dim) * 2
    written = SHARED[torch.ops.aten._weight_norm.default](direction, length, dim)
    torch.testing.assert_close(written, torch._weight_norm(direction, length, dim))
