"""The cells of a notebook in one interpreter, with what people do in them: run cells again."""

import linecache

import pytest

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

START = """
import torch
from torch import nn
import mpxla as smp

smp.init({"microbatches": 2})
"""
MODEL = """
torch.manual_seed(0)
model = smp.DistributedModel(nn.Linear(4, 1))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
inputs = torch.randn(8, 4)
"""
STEP = """
@smp.step
def train_step(model, inputs):
    loss = {factor} * model(inputs).square().mean()
    model.backward(loss)
    return loss
"""
TRAIN = """
losses = []
for _ in range(2):
    optimizer.zero_grad()
    losses.append(train_step(model, inputs).reduce_mean().item())
    optimizer.step()
losses
"""
END = "smp.shutdown()"


class Notebook:
    """Runs cells as IPython does: compiled under a name of their own, in one namespace."""

    def __init__(self):
        self.names = {"__name__": "__main__"}
        self.count = 0

    def run(self, cell):
        self.count += 1
        name = f"<ipython-input-{self.count}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        exec(compile(cell, name, "exec"), self.names)


def cells():
    """Losses of: a run, the same cells again, a changed step, and a session started anew."""
    notebook = Notebook()
    for cell in (START, MODEL, STEP.format(factor=1), TRAIN):
        notebook.run(cell)
    found = [notebook.names["losses"]]
    for cell in (MODEL, STEP.format(factor=1), TRAIN):
        notebook.run(cell)
    found.append(notebook.names["losses"])
    notebook.run(MODEL)
    notebook.run(STEP.format(factor=3))
    notebook.run(TRAIN)
    found.append(notebook.names["losses"])
    for cell in (END, START, MODEL, STEP.format(factor=1), TRAIN, END):
        notebook.run(cell)
    return [*found, notebook.names["losses"]]


def an_error():
    """What a cell says whose step cannot be captured."""
    notebook = Notebook()
    for cell in (START, MODEL, STEP.format(factor="abs(complex(model(inputs).sum()))")):
        notebook.run(cell)
    try:
        notebook.run(TRAIN)
    except Exception as error:
        return str(error)


def test_an_error_names_the_cells_line():
    (text,) = run_ranks(an_error, 1)
    assert "at <ipython-input-3>:4: loss = abs(complex(model(inputs).sum())) * model(" in text


def plainly(factor):
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs, losses = torch.randn(8, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = factor * model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_cells_can_be_run_again():
    (found,) = run_ranks(cells, 1)
    once, thrice = (pytest.approx(plainly(factor), rel=1e-5) for factor in (1, 3))
    assert found == [once, once, thrice, once]
