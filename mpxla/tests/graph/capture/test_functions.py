"""Functions of torch that a captured step writes in another way have torch's values."""

import copy

import pytest
import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import OutputKind
from mpxla.tests.graph.capture.test_capture import backward, capture, outputs_of

pytestmark = pytest.mark.unit

WAVES = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
WINDOW = torch.hann_window(16)


def sides(x, **keys):
    found = torch.stft(x, 16, 4, 12, torch.hamming_window(12), return_complex=True, **keys)
    return torch.istft(found, 16, 4, 12, torch.hamming_window(12), **keys)


TRANSFORMED = {
    "length": lambda x: torch.stft(x, 16, 4, 16, WINDOW, return_complex=True).istft(
        16, 4, 16, WINDOW, length=70
    ),
    "normalized": lambda x: torch.istft(
        torch.stft(x[0], 16, 4, 16, WINDOW, normalized=True, return_complex=True) * 2,
        *(16, 4, 16, WINDOW),
        normalized=True,
    ),
    "one side": sides,
    "two sides": lambda x: sides(x, onesided=False),
    "no window": lambda x: torch.istft(
        torch.stft(x, 8, window=torch.ones(8), center=False, return_complex=True),
        *(8, 2, 8, torch.ones(8)),
        center=False,
        length=40,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("normalized", "one side")))
        for n in TRANSFORMED
    ],
)
def test_inverse_fourier_transforms_of_windows(name):
    model = nn.Linear(6, 4)
    function = TRANSFORMED[name]

    def step(leaves):
        return function(WAVES + model.bias.sum())

    captured = capture(model, step)
    with torch.no_grad():
        (found,) = outputs_of(captured, model, [torch.randn(4, 6)])
    torch.testing.assert_close(found, step(()).detach(), rtol=1e-5, atol=1e-5)


def test_the_greatest_and_least_of_a_vector_in_python():
    model = nn.Linear(6, 4)

    def step(leaves):
        score = model(leaves[0])
        return max(score[0]) - min(score[1]), max(score[:1, 0], 0.0), max(list(score[2]))

    x = torch.randn(4, 6)
    with torch.no_grad():
        for found, expected in zip(
            outputs_of(capture(model, step), model, [x]), step([x]), strict=True
        ):
            # Python's 0.0, where it is the greatest, has no dimension.
            torch.testing.assert_close(found, torch.as_tensor(expected).reshape(found.shape))


def test_copies_of_modules_are_apart_from_them():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())

    def step(leaves):
        other = copy.deepcopy(model)
        scores = other(leaves[0])
        slopes = torch.autograd.grad(scores.square().sum(), list(other.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(other.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope
        same = copy.deepcopy([other[0].weight, other[0].weight])
        assert same[0] is same[1]
        return other(leaves[0]), model(leaves[0]), copy.deepcopy(leaves[0]).zero_() + leaves[0]

    x = torch.randn(4, 6)
    captured = capture(model, step)
    with torch.no_grad():
        found = outputs_of(captured, model, [x])
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(found, [value.detach() for value in step([x])])
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda parts: torch.nested.nested_tensor(parts),
        lambda parts: torch.nested.as_nested_tensor(parts),
        lambda parts: torch.nested.nested_tensor_from_jagged(parts[1], torch.tensor([0, 1, 3])),
    ],
)
def test_nested_tensors_are_refused(make):
    with pytest.raises(CaptureError, match=r"nested tensor is made .*_functions\.py.*pad_sequence"):
        capture(nn.Linear(6, 4), lambda leaves: make([leaves[0][:1], leaves[0]]))


def seen_only(model, hidden):
    with torch.no_grad():
        model.seen.add_(hidden.float().mean() + hidden.contiguous().std())
    return hidden


def kept(model, hidden):
    with torch.no_grad():
        hidden = hidden.to(torch.float32)
        model.seen.add_(hidden.clone().mul_(2).mean())
    return hidden


def written_later(model, hidden):
    with torch.no_grad():
        scale = hidden.sin()
        seen = model.seen.view(1)
    scale.mul_(model.bias)
    seen.add_(1)
    return hidden * scale * model.seen


@torch.inference_mode()
def inferred(model, hidden):
    seen = hidden.mean() + model.bias.sum()
    with torch.inference_mode(False):
        return hidden * model.bias + seen


@pytest.mark.parametrize("function", [seen_only, kept, written_later, inferred])
def test_what_is_done_without_gradients_leaves_those_of_the_rest(function):
    """Calls that give the tensor itself (`hidden.float()` of floats), later writes, inference.

    Each loss is computed from the buffer's first value.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    model.register_buffer("seen", torch.zeros(()))

    def loss(leaves):
        return function(model, model(leaves[0]).tanh()).square().sum()

    step = capture(model, lambda leaves: backward(loss(leaves)))
    expected = torch.autograd.grad(loss([x]), model.parameters())
    model.seen.zero_()
    roles = [role.kind for _, role in step.ends]
    objective = outputs_of(step, model, [x])[roles.index(OutputKind.OBJECTIVE)]
    torch.testing.assert_close(torch.autograd.grad(objective, model.parameters()), expected)


def test_detached_tensors_with_a_gradient_of_what_was_written_are_refused():
    def loss(model, leaves):
        detached = model(leaves[0]).detach()
        detached.mul_(model.bias)
        return backward(detached.sum())

    model = nn.Linear(6, 6)
    with pytest.raises(CaptureError, match=r"detached tensor .*_functions\.py.*detached\.sum\(\)"):
        capture(model, lambda leaves: loss(model, leaves))
