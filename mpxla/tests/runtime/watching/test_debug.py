"""`smp.debug_print` shows values where they are and changes nothing; `print` says what to use."""

import contextlib
import io
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.tests.ranks.run import run_ranks

STAGES = 2
MICROBATCHES = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.is_shown = False

    def forward(self, x):
        hidden = self.first(x)
        if self.is_shown:
            smp.debug_print(hidden, label="hidden")
        hidden.mul_(2)  # after the line that shows it
        return self.second(torch.tanh(hidden))


def batch():
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, 4)


def build(is_shown):
    torch.manual_seed(0)
    net = Net()
    net.is_shown = is_shown
    return net


def captured(function, *shapes):
    """What a step function prints while it is captured."""
    net = build(False)
    heard = io.StringIO()
    leaves = [TensorLeaf(shape, torch.float32) for shape in shapes]
    with contextlib.redirect_stdout(heard):
        graph = capture_step(
            ToCapture(
                lambda leaves: function(net, *leaves), net, leaves, {n: n for n in net.state_dict()}
            )
        )
    return heard.getvalue(), graph


@pytest.mark.unit
def test_print_says_what_to_use():
    def step(net, x):
        loss = net(x).sum()
        number = loss.item()
        print(x)
        print(f"loss {loss:.3f}, {number:.3f}")
        print([net.first.weight], number)
        return number

    text, _ = captured(step, (2, 4))
    what = "no value while the step is captured; smp.debug_print(tensor) prints values>"
    assert text.count(what) == 5
    assert f"<float32[2, 4]: {what}" in text
    numbered = re.sub(r" \d+: no value", ": no value", text)  # which texts of results are known by
    assert f"loss <float32[]: {what}, <number: {what}\n" in numbered
    assert "FakeTensor" not in text and "zuf0" not in text
    assert repr(torch.ones(1)) == f"{torch.ones(1)}" == "tensor([1.])"


@pytest.mark.unit
def test_symbols_have_their_own_texts_again():
    before = torch.SymFloat.__repr__, torch.SymFloat.__format__
    captured(lambda net, x: net(x).sum().item(), (2, 4))
    assert (torch.SymFloat.__repr__, torch.SymFloat.__format__) == before


@pytest.mark.unit
def test_a_print_is_a_further_result():
    def step(net, x):
        smp.debug_print(x, label="input")
        y = net(x)
        smp.debug_print(y)
        return y.sum()

    _, graph = captured(step, (2, 4))
    assert [leaf.output for leaf in graph.result_leaves] == [0]
    assert [p.result for p in graph.prints] == [1, 2]
    assert graph.prints[0].label == "input"
    assert graph.prints[1].label.startswith("test_debug.py:")


@pytest.mark.unit
def test_numbers_are_printed_and_other_things_are_refused():
    _, graph = captured(lambda net, x: smp.debug_print(net(x).sum().item()), (2, 4))
    assert len(graph.prints) == 1
    with pytest.raises(CaptureError, match=r"debug_print was given str at .*test_debug.py"):
        captured(lambda net, x: smp.debug_print("text"), (2, 4))


@pytest.mark.unit
def test_outside_of_steps_it_prints_at_once(capsys):
    smp.debug_print(torch.ones(2), "ones")
    smp.debug_print(torch.ones(2))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ones: tensor([1., 1.])"
    assert second.startswith("test_debug.py:") and second.endswith(": tensor([1., 1.])")


def run(pipeline, is_shown):
    """Losses, gradients, and what each of two steps and an evaluation printed on this rank."""
    smp.init(
        {
            "pipeline_parallel_degree": STAGES,
            "microbatches": MICROBATCHES,
            "pipeline": pipeline,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    net = build(is_shown)
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        if is_shown:
            smp.debug_print(loss, label="loss")
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model, x):
        return model(x).square().mean()

    losses, texts = [], []
    for step in (train, train, evaluate):
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            losses.append([t.item() for t in step(model, batch()).outputs])
        texts.append(heard.getvalue())
    gradients = {n: p.grad.cpu().clone() for n, p in model.local_named_parameters()}
    return losses, gradients, texts


@pytest.mark.ranks
@pytest.mark.parametrize(
    "pipeline", [pytest.param("simple", marks=pytest.mark.slow), "zero_bubble"]
)
def test_every_microbatch_is_shown_where_it_is(pipeline):
    quiet, loud = (run_ranks(run, STAGES, pipeline, shown) for shown in (False, True))
    net = build(False)
    parts = batch().chunk(MICROBATCHES)
    hidden = [net.first(x).detach() for x in parts]
    loss = [net(x).square().mean().detach() for x in parts]
    for rank, (losses, gradients, texts) in enumerate(loud):
        assert losses == quiet[rank][0]
        assert {n: g.tolist() for n, g in gradients.items()} == {
            n: g.tolist() for n, g in quiet[rank][1].items()
        }
        assert quiet[rank][2] == ["", "", ""]
        for text, is_training in zip(texts, (True, True, False), strict=True):
            name, values = ("hidden", hidden) if rank == 0 else ("loss", loss)
            shown = values if rank == 0 or is_training else []
            assert text.count("[rank") == text.count(f"[rank {rank}] {name}, ") == len(shown)
            parts = text.split("[rank ")[1:]
            for microbatch, (part, value) in enumerate(zip(parts, shown, strict=True)):
                title, _, printed = part.partition(":")
                assert title == f"{rank}] {name}, microbatch {microbatch}"
                found = eval(printed.strip(), {"tensor": torch.tensor})
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
