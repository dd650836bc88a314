"""Options and results of `smp.step`, through all stages of a pipeline."""

import dataclasses
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

import mpxla as smp
from mpxla.tests.clients import BATCH, close, data, raw_model, start
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def use_options():
    start()
    model = smp.DistributedModel(raw_model())
    x, _ = data()

    @smp.step(non_split_inputs=["table"], input_split_axes={"columns": 1, "pairs": -1})
    def step(model, x, table, columns, pairs):
        assert (x.shape[0], table.shape[0]) == (BATCH // 2, 3)
        assert columns.shape == (5, BATCH // 2) and pairs[0].shape == (2, BATCH // 2)
        return model(x + columns.T) * table + pairs[0].sum(0)[:, None], table

    table = torch.tensor([1.0, 2.0, 3.0])
    pairs = [torch.arange(2.0 * BATCH).reshape(2, BATCH)]
    made, same = step(model, x, table, columns=2 * x.T, pairs=pairs)
    return made.concat().cpu(), [t.tolist() for t in same.outputs]


def test_some_inputs_are_whole_and_some_split_elsewhere():
    x, _ = data()
    with torch.no_grad():
        expected = raw_model()(3 * x) * torch.tensor([1.0, 2.0, 3.0])
    expected += torch.arange(2.0 * BATCH).reshape(2, BATCH).sum(0)[:, None]
    for made, same in run_ranks(use_options, 2):
        close(made, expected)
        assert same == [[1.0, 2.0, 3.0]] * 2


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    more: object


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Frozen:
    logits: torch.Tensor
    name: str


def return_objects():
    start()
    model = smp.DistributedModel(raw_model())

    @smp.step
    def step(model, x):
        y = model(x)
        more = SimpleNamespace(a=[Frozen(y, "a"), y.max().item()], b=UserDict(x=x, weight=None))
        return Result(y.mean(), more)

    result = step(model, data()[0])
    more = result.more
    assert type(result) is Result and type(more) is SimpleNamespace and type(more.b) is UserDict
    frozen, largest = more.a
    assert type(frozen) is Frozen and frozen.name == "a"
    assert more.b["weight"] is None
    tensors = [result.loss.stack(), frozen.logits.concat(), more.b["x"].concat()]
    return [tensor.cpu() for tensor in tensors], largest


def test_objects_that_hold_tensors_are_returned():
    """Dataclasses, namespaces and mappings, with a StepOutput in the place of every tensor."""
    x, _ = data()
    with torch.no_grad():
        parts = [raw_model()(part) for part in x.chunk(2)]
    expected = torch.stack([part.mean() for part in parts]), torch.cat(parts), x
    for tensors, largest in run_ranks(return_objects, 2):
        for tensor, wanted in zip(tensors, expected, strict=True):
            close(tensor, wanted)
        close(torch.tensor(largest), torch.stack([part.max() for part in parts]))
