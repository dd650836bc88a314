"""What Python asks of a step that is captured, beside rows that masks choose."""

import pytest
import torch
from torch import nn

from mpxla.graph.capture.known import with_values_if_needed
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.graph.user_code import ValueNeededError
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import FLOATS, run

pytestmark = pytest.mark.unit


def captured(model, function, *answers):
    names = ModelState(model).canonical_names
    return capture_step(
        ToCapture(
            lambda leaves: function(model, leaves[0]), model, (FLOATS,), names, answers=answers
        )
    )


def inputs(scale):
    torch.manual_seed(0)
    return nn.Linear(6, 6), scale * torch.randn(FLOATS.shape)


def few(model, x):
    h = model(x)
    rows = h[h[:, 0] > 0]
    if len(rows) <= 1:
        return h.sum()
    return rows.exp().mean()


@pytest.mark.parametrize("number", range(4))
def test_numbers_of_rows_may_be_asked_for(number):
    model, x = inputs(0.1)
    with torch.no_grad():
        model.bias[0] = 0
        model.weight[0] = torch.eye(6)[0]
    x[:, 0] = torch.tensor([1.0] * number + [-1.0] * (len(x) - number))
    question = captured(model, few)
    assert question.is_question
    (is_few,) = run(question, model, [x])
    assert is_few.item() == (number <= 1)
    (found,) = run(captured(model, few, int(is_few)), model, [x])
    torch.testing.assert_close(found, few(model, x).detach())


def inside(model, x):
    """Asks in the way that it goes if a mask is true anywhere, and once more."""
    h = model(x)
    mask, out = h[:, 0].abs() < 1, torch.zeros_like(h)
    if mask.any():
        kept = h[mask]
        if kept.max() > 1:
            kept = kept / 2
        out[mask] = kept
    if h.min() < -1:
        out = out - 3
    return out.sum()


@pytest.mark.parametrize("scale", [0.3, 3.0, 1000.0])
def test_answers_belong_to_the_questions_of_a_way(scale):
    """Without rows the first question is not asked."""
    model, x = inputs(scale)
    answers = []
    while (step := captured(model, inside, *answers)).is_question:
        answers = [int(value) for value in run(step, model, [x])]
    (found,) = run(step, model, [x])[:1]
    torch.testing.assert_close(found, inside(model, x).detach())


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, [None, False, True]),
        ({"are_needed": True}, [False, True]),
        ({"are_needed": True, "decide_sizes": True}, [True]),
    ],
)
def test_values_decide_no_more_than_they_have_to(keys, wanted):
    seen = []

    def capture(known):
        seen.append(known and known.decide_sizes)
        if len(seen) < len(wanted):
            raise ValueNeededError("not yet")
        return "captured"

    assert with_values_if_needed(capture, lambda: (), **keys) == "captured"
    assert seen == wanted
