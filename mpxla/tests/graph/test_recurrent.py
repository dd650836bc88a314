"""Recurrent layers of a captured step: layer after layer, with the numbers of PyTorch."""

import pytest
import torch
from torch import nn

from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf
from mpxla.graph.capture.torch_parts import torchs_recurrences
from mpxla.graph.cost import MachineModel, build_problem
from mpxla.graph.recurrent import LAYER
from mpxla.tests.graph.capture.test_capture import capture, outputs_of

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:LSTM with projections")]

LAYERS = {
    "lstm": lambda: nn.LSTM(4, 3, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(4, 3, 2, batch_first=True, proj_size=2, bias=False),
    "projected with biases": lambda: nn.LSTM(4, 3, proj_size=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True),
    "gru without biases": lambda: nn.GRU(4, 3, bias=False),
    "tanh": lambda: nn.RNN(4, 3, 2, bidirectional=True),
    "relu": lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True),
}


@pytest.fixture(autouse=True)
def torchs_own():
    with torchs_recurrences():
        yield


def captured(model, shape=(5, 6, 4), dtype=torch.float32, autocast=None):
    def step(leaves):
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            output, last = model(*leaves)
        current_recorder().backward(output.float().square().mean())
        return output, last

    return capture(model, step, TensorLeaf(shape, dtype))


def layers_of(step):
    return step.graph.find_nodes(op="call_function", target=LAYER)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("lstm", "gru", "projected")))
        for kind in LAYERS
    ],
)
@pytest.mark.parametrize("shape", [(5, 6, 4), pytest.param((5, 4), marks=pytest.mark.slow)])
def test_values_and_gradients(kind, shape):
    torch.manual_seed(0)
    model, x = LAYERS[kind](), torch.randn(shape)
    step = captured(model, shape)
    assert len(layers_of(step)) == model.num_layers * (1 + model.bidirectional)
    loss, *found = outputs_of(step, model, [x])
    output, last = model(x)
    torch.testing.assert_close(found, [output, *(last if isinstance(last, tuple) else [last])])
    torch.testing.assert_close(
        torch.autograd.grad(loss, [*model.parameters()]),
        torch.autograd.grad(output.square().mean(), [*model.parameters()]),
    )


def test_dropout_is_drawn_between_layers():
    """PyTorch's way to take such an operator apart leaves it out (2.9)."""
    model, x = nn.LSTM(4, 3, 3, dropout=0.5), torch.randn(5, 6, 4)
    step = captured(model)
    drawn = [n for n in step.graph.nodes if "dropout" in str(n.target)]
    assert [node.args[1] for node in drawn] == [0.5, 0.5]
    one, other = (outputs_of(step, model, [x])[1] for _ in range(2))
    assert (one - other).abs().max() > 1e-3
    model.eval()
    torch.testing.assert_close(outputs_of(captured(model), model, [x])[1], model(x)[0])


@pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_autocast_is_that_of_layers_on_devices(kind):
    """They compute in 16 bits, and give such values."""
    model = LAYERS[kind]()
    step = captured(model, autocast=torch.bfloat16)
    assert all(n.meta["val"][0].dtype is torch.bfloat16 for n in layers_of(step))
    x = torch.ones(5, 6, 4)
    found = outputs_of(step, model, [x])[1].float()
    torch.testing.assert_close(found, model(x)[0].detach(), atol=0.02, rtol=0.02)


def test_operations_are_counted():
    step = captured(nn.GRU(4, 3))
    (layer,) = layers_of(step)
    problem = build_problem(step, MachineModel())
    (place,) = [i for i, unit in enumerate(problem.members) if layer in unit]
    assert problem.flops[place] == 2 * 5 * 6 * (4 * 9 + 3 * 9)
