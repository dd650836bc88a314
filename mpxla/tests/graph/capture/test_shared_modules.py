"""Models in which a module has two names: a step sees modules of their own classes."""

import pytest
import torch
from torch import nn

from mpxla.tests.graph.capture.test_capture import capture, run

pytestmark = pytest.mark.unit


class Asking(nn.Module):
    """Goes by the classes of its layers."""

    def __init__(self):
        super().__init__()
        self.first = self.again = nn.Linear(6, 6)
        self.others = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))])

    def forward(self, x):
        for layer in (self.first, *self.others, self.again):
            x = layer(x)
            if type(layer) is nn.Linear:
                x = x.tanh()
            if layer.__class__ == nn.Sequential:
                x = 3 * x
        return x


class Layers(nn.Module):
    """Slices are lists of its own class, which asks for a keyword of classes that are derived."""

    derived = ()

    def __init_subclass__(cls, *, name, **keys):
        super().__init_subclass__(**keys)
        Layers.derived += (name,)

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def __getitem__(self, places):
        return self.__class__([*self.layers][places])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Slicing(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.body = Layers([shared, nn.Linear(6, 6), shared])

    def forward(self, x):
        return self.body[1:](x)


@pytest.mark.parametrize("make", [Asking, Slicing])
def test_modules_are_of_their_classes(make):
    model, x = make(), torch.randn(4, 6)
    captured = capture(model, lambda leaves: model(leaves[0]))
    torch.testing.assert_close(run(captured, model, [x])[0], model(x))
    assert not Layers.derived
