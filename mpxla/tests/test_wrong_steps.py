"""Wrong use of step functions ends with a text that says what to do, on all ranks."""

import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import (
    CaptureError,
    MpxlaError,
    PeerFailure,
    RankMismatch,
    StepError,
)
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import (
    batch,
    check,
    check_texts,
    evaluate,
    made,
    refused,
    train,
)

pytestmark = pytest.mark.ranks


# Arguments of a step.


def feed(rank_0_input):
    """A batch that cannot be used, then a good one: all ranks are still in step."""
    model = made()
    text = refused(lambda: train(model, rank_0_input if smp.rank() == 0 else batch()))
    return text, train(model, batch()).reduce_mean().item()


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (torch.ones(5, 5), r"^x: a batch of 5 samples .* does not divide into 2 microbatches"),
        ({torch.ones(1)}, r"^x\[\.\.\.\]: a batch of 1 samples"),
    ],
)
def test_batch_that_does_not_divide(value, pattern):
    results = run_ranks(feed, 2, value)
    for rank, ((kind, text), _) in enumerate(results):
        assert kind == "StepError"
        assert re.search(pattern, text), text
        assert text.endswith("(found on pp_rank 0)") == (rank == 1)
    assert results[0][1] == results[1][1] > 0


class Uneven:
    def smp_slice(self, num_mb, mb, axis):
        return torch.ones(2 + mb, 5)


def slice_unevenly():
    train(made(), Uneven())


def test_uneven_slices():
    check(slice_unevenly, RankMismatch, r"microbatch 1 differs from microbatch 0 .* smp_slice has")


class Exploding:
    def smp_slice(self, num_mb, mb, axis):
        raise KeyError("no such column")


def fail_to_slice():
    try:
        train(made(), Exploding())
    except KeyError as error:
        return "KeyError", str(error)
    except PeerFailure as error:
        return "PeerFailure", str(error)


def test_an_error_in_smp_slice_is_known_everywhere():
    first, second = run_ranks(fail_to_slice, 2)
    assert first == ("KeyError", "'no such column'")
    assert second[0] == "PeerFailure"
    assert "rank 0 raised KeyError in step function" in second[1]


def call_with_wrong_arguments():
    train(made(), batch(), 3)


def test_arguments_that_do_not_fit_the_function():
    check(call_with_wrong_arguments, StepError, r"train: too many positional arguments")


def name_unknown_parameters():
    smp.step(non_split_inputs=["mask"])(lambda model, x: None)


def test_options_that_name_no_parameter():
    check(name_unknown_parameters, StepError, r"mask in non_split_inputs .* are model, x\.")


# The step function.


@smp.step
def branch_on_a_tensor(model, x):
    loss = model(x).mean()
    if complex(loss).real > 0:
        loss = loss * 2
    model.backward(loss)
    return loss


@smp.step
def detach_the_loss(model, x):
    loss = model(x).mean().detach()
    model.backward(loss)
    return loss


@smp.step
def differentiate_a_constant(model, x):
    loss = x.mean()
    model.backward(loss)
    return loss


@smp.step
def differentiate_a_matrix(model, x):
    model.backward(model(x))


@smp.step
def give_too_few_gradients(model, x):
    y = model(x)
    model.backward([y, y], [torch.ones_like(y)])


@smp.step
def give_a_wrong_gradient(model, x):
    model.backward(model(x), torch.ones(7))


@smp.step
def call_autograd(model, x):
    model(x).mean().backward()


@smp.step
def nest_steps(model, x):
    return train(model, x)


class Holder:
    def __init__(self, value):
        self.value = value


@smp.step
def hide_a_tensor(model, x):
    return {model(x)}


@smp.step
def compute_with_a_number(model, x):
    loss = model(x).mean()
    return loss * math.gamma(loss.item())


_stranger = nn.Linear(5, 3)


@smp.step
def use_a_stranger(model, x):
    loss = (model(x) + _stranger(x)).mean()
    model.backward(loss)


@smp.step
def mismatch_shapes(model, x):
    return model(x[:, :2])


def run_step(name):
    return refused(lambda: globals()[name](made(), batch()))


@pytest.mark.parametrize(
    ("name", "kind", "pattern"),
    [
        (
            "branch_on_a_tensor",
            CaptureError,
            r"depends on a tensor's value in Python at .*test_wrong_steps\.py:\d+: if complex",
        ),
        (
            "detach_the_loss",
            CaptureError,
            r"model\.backward was called on a tensor that no parameter contributed to at .*:\d+: "
            r"model\.backward\(loss\)",
        ),
        ("differentiate_a_constant", CaptureError, "that no parameter contributed to at"),
        (
            "differentiate_a_matrix",
            CaptureError,
            r"tensor of shape \[2, 3\] without a gradient at .* Reduce the loss to a scalar",
        ),
        ("give_too_few_gradients", CaptureError, r"got 2 tensors and 1 gradients at .*:\d+"),
        ("give_a_wrong_gradient", CaptureError, r"shape \[7\] for a tensor of shape \[2, 3\]"),
        (
            "call_autograd",
            CaptureError,
            r"backward\(\) was called in a step function at .*Call mod",
        ),
        ("nest_steps", StepError, "step function train was called inside another step function"),
        ("hide_a_tensor", CaptureError, r"object of type set that holds tensors \(0\)"),
        (
            "compute_with_a_number",
            CaptureError,
            r"depends on a tensor's value in Python at .*math\.gamma\(loss\.item\(\)\)",
        ),
        (
            "use_a_stranger",
            CaptureError,
            r"trainable parameter of shape \[3.*\] that is not read from the",
        ),
        ("mismatch_shapes", CaptureError, r"could not be captured at .*wrong_uses\.py:\d+"),
    ],
)
def test_step_functions_that_cannot_be_captured(name, kind, pattern):
    check_texts(run_ranks(run_step, 2, name), kind, pattern)


def raise_in_function():
    model = made()

    @smp.step
    def function(model, x):
        raise LookupError("my own error")

    try:
        function(model, batch())
    except LookupError as error:
        return str(error), error.__notes__


def test_errors_of_the_user_keep_their_class():
    for text, (note,) in run_ranks(raise_in_function, 2):
        assert text == "my own error"
        assert "raised while the step function was captured at" in note
        assert 'raise LookupError("my own error")' in note


# Objects and arguments that a step accepts with a warning.


def discouraged():
    from mpxla.log import get_logger

    lines = []

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    model = made(gradient_as_bucket_view=True)
    smp.step(detach_outputs=False)(lambda model, x: model(x))
    step = smp.step(lambda model, x, other, optimizer: F.relu(model(x)))
    step(model, batch(), Holder(batch()), torch.optim.SGD(model.parameters(), lr=0.1))
    get_logger().removeHandler(handler)
    return [line for line in lines if not re.search("compiled|configuration|stage ", line)]


def test_warnings():
    first, _ = run_ranks(discouraged, 2)
    expected = [
        r"gradient_as_bucket_view=True\) has no effect",
        r"detach_outputs=False\) has no effect",
        r"other of type Holder is passed whole .* smp_slice\(num_mb, mb, axis\)",
    ]
    assert len(first) == len(expected), first
    assert all(re.search(p, line) for p, line in zip(expected, first, strict=True)), first


# Hooks on gradients.


def double(gradient):
    return 2 * gradient


def shrink(gradient):
    return gradient / gradient.norm() if gradient.norm() > 1e-9 else gradient


def step_with_a_hook():
    model = made({})
    model.module.first.bias.register_hook(shrink)
    evaluate(model, batch())
    train(model, batch())


def test_hooks_on_gradients_are_refused():
    text = r"hook on the gradient of first\.bias changes it, .* values in Python, .*torch\.where"
    check(step_with_a_hook, MpxlaError, text, world_size=1)
