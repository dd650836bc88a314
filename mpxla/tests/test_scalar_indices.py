"""Indices that are tensors without dims read and write what they do in plain PyTorch."""

import warnings

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
PLACES = torch.tensor([1, 3, -1, 0])


def labelled(model, y, places):
    return sum(y[row, places[row]] for row in range(len(y))) * torch.ones_like(y)


def written(model, y, places):
    z = y * 2
    z[places[0]] = y[0] * 3
    z[:, places[1]] = 0.5
    z[..., places[2]] += y[:, 0]
    z[places[1], 1:3] -= y[0, 1:3]
    z[None, places[0], ..., :2] = y[:1, None, :2]
    z.t()[1, places[0]] = places[1]
    z[places[0], 3] = y.mean().item()
    return z


def mixed(model, y, places):
    cube = torch.stack([y, y * 2, y * 3])
    column = cube[:, None, ..., places[0]] + cube[places[2], 1:3, None].mean()
    picked = cube[places[2], :, [0, 2]] + cube[-1, places[1], 1:3]
    return y + (column.sum() + picked.sum()) * 0.01


def remembered(model, y, places):
    """A ring of earlier values, with its position in a buffer."""
    model.ring[model.position] = y[0].detach()
    model.position += 1
    return y + model.ring.sum(0) + model.ring[model.position - 1]


def lists(model, y, places):
    """PyTorch takes lists with lists, tensors or slices in them for tuples, and longer ones not."""
    rows, columns = [0, 1, 2], [1, 0, 2]
    z = y * 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later PyTorch will not
        z[[rows, columns]] += 1
        z[[places[0], slice(1, 3)]] = y[[slice(0, 1), 2]]
        found = y[[rows, columns]].sum() + y[[places[:2], places[1:3]]].mean()
        found = found + y[[None, 1]].mean() + y[[..., range(2)]].mean()
    return z + (found + y[[[0, 1]] * 32].mean()) * 0.1


FUNCTIONS = [labelled, written, mixed, remembered, lists]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("ring", torch.zeros(8, 5))
        self.register_buffer("position", torch.tensor(0))
        self.function = function

    def forward(self, x, places):
        return self.last(self.function(self, torch.tanh(self.first(x)), places))


def trained(step, model):
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if step is not None:
        optimizer = smp.DistributedOptimizer(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        if step is not None:
            losses += step(model, X, PLACES).outputs
        else:
            for x in X.chunk(2):
                losses.append(model(x, PLACES).square().mean())
                (losses[-1] / 2).backward()
        optimizer.step()
    return torch.stack([loss.detach().cpu() for loss in losses]), model.state_dict()


def train(num_stages, functions):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})

    @smp.step(non_split_inputs=["places"])
    def step(model, x, places):
        loss = model(x, places).square().mean()
        model.backward(loss)
        return loss

    found = []
    for function in functions:
        losses, state = trained(step, smp.DistributedModel(Model(function)))
        found.append((losses, {name: value.cpu() for name, value in state.items()}))
    return found


def change_a_copy():
    smp.init({"microbatches": 2})

    @smp.step
    def evaluate(model, x):
        y = model(x) * 1
        y[x.argmax()].mul_(2)
        return y

    with pytest.raises(CaptureError) as error:
        evaluate(smp.DistributedModel(nn.Linear(5, 5)), X)
    return str(error.value)


def test_a_write_into_what_was_read_is_refused():
    (text,) = run_ranks(change_a_copy, 1)
    assert "changes in place what it has read at" in text
    assert "y[x.argmax()].mul_(2)" in text
    assert "write x[i] = value" in text


@pytest.mark.parametrize(
    ("num_stages", "functions"),
    [
        (1, [labelled, mixed, lists]),
        *(pytest.param(stages, FUNCTIONS, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_places_are_read_and_written(num_stages, functions):
    for found in run_ranks(train, num_stages, num_stages, functions):
        for function, one in zip(functions, found, strict=True):
            torch.testing.assert_close(one, trained(None, Model(function)), msg=function.__name__)
