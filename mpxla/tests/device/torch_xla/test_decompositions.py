"""Operators that torch_xla 2.9 gets wrong; each test of a reason fails when it is fixed there."""

import pytest
import torch

from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks


def fallbacks_of(*calls):
    import torch_xla
    import torch_xla.debug.metrics as metrics

    metrics.clear_all()
    for call in calls:
        call()
    torch_xla.sync()
    return [name for name in metrics.counter_names() if name.startswith("aten::")]


def fill_and_unfold():
    from torch_xla import device

    x, value = torch.zeros(4, 4, device=device()), torch.tensor(2.0, device=device())
    return (
        fallbacks_of(lambda: torch.ops.aten.fill.Tensor(x, value)),
        fallbacks_of(lambda: torch.ops.aten.unfold_copy(x, 0, 2, 2)),
    )


def test_reason_for_fill_and_unfold():
    ((fill, unfold),) = run_ranks(fill_and_unfold, 1)
    assert fill == ["aten::_local_scalar_dense"]
    assert unfold == ["aten::unfold_copy"]


def gradients_of_elu():
    from mpxla.device.torch_xla.tensors import current_device

    values = torch.linspace(-2, 1, 7)
    found = []
    for place in (current_device(), "cpu"):
        x = values.clone().to(place).requires_grad_()
        torch.nn.functional.elu(x).sum().backward()
        found.append(x.grad.cpu())
    return found


def test_reason_for_elu():
    # In a process of its own: autograd knows no device that came after its first backward.
    (result,) = run_ranks_unpooled(gradients_of_elu, 1)
    on_device, host = result.value
    assert not torch.allclose(host, on_device)


def permutations_of_one_seed():
    import torch_xla.core.xla_model as xm

    from mpxla.device.torch_xla.tensors import current_device

    device, found = current_device(), []
    for _ in range(2):
        xm.set_rng_state(5)
        found.append(torch.randperm(100, device=device).cpu())
    return found


def test_reason_for_randperm():
    ((first, second),) = run_ranks(permutations_of_one_seed, 1)
    assert not torch.equal(first, second)


def test_reason_for_copy():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for aten::copy is not implemented"):
        torch.ops.aten.copy.default(torch.zeros(3), x).sum().backward()


def running_variance():
    from torch_xla import device

    torch.manual_seed(0)
    x = torch.randn(4, 3)
    norm, on_device = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).to(device())
    norm(x)
    on_device(x.to(device()))
    return norm.running_var, on_device.running_var.cpu(), x.var(dim=0, unbiased=False)


def test_reason_for_batch_norm():
    ((host, on_device, biased),) = run_ranks(running_variance, 1)
    assert not torch.allclose(host, on_device)
    assert torch.allclose(on_device, 0.9 + 0.1 * biased)


@pytest.mark.parametrize(
    ("shape", "dimension", "size", "step"),
    [
        ((7,), 0, 3, 2),
        ((2, 8, 8), 1, 4, 4),
        ((2, 9, 5), -1, 2, 3),
        ((3, 4, 6), 2, 6, 1),
        ((5, 2), 0, 1, 1),
    ],
)
def test_replacement_of_unfold_is_unfold(shape, dimension, size, step):
    ((actual, expected),) = run_ranks(both_unfolds, 1, shape, dimension, size, step)
    assert torch.equal(actual, expected)


def both_unfolds(*arguments):
    from mpxla.device.torch_xla.operators.decompositions import REPLACEMENTS

    shape, *rest = arguments
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    replace = REPLACEMENTS[torch.ops.aten.unfold.default]
    return replace(x, *rest), x.unfold(*rest)


class Drop(torch.nn.Module):
    def forward(self, x):
        values = torch.ops.aten.native_dropout.default(x, 0.5, True)
        return [values[0], values[1]]


def mask_of_dropout():
    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device, to_device
    from mpxla.stage.spec import TensorSpec

    device = current_device()
    graph = torch.fx.symbolic_trace(Drop())
    program = compile_graph("trial", graph, [TensorSpec((8,), torch.float32)], device)
    _, mask = program(to_device([torch.ones(8)], device), to_device([torch.tensor(3)], device)[0])
    return mask.cpu()


def test_reason_for_dropout():
    (mask,) = run_ranks(mask_of_dropout, 1)
    assert mask.dtype is torch.float32  # PyTorch's is bool
    assert set(mask.tolist()) == {0.0, 2.0}
