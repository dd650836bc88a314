"""Ids beyond a table and labels beyond the classes are errors on all ranks, as in PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.backends import backend_here
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, padding_idx=0)
        self.shift = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        place = ids.float().mean(dim=1).mul(4).round().long()  # made inside
        return self.head(self.table(ids).mean(dim=1) + self.shift(place))


@smp.step
def train(model, ids, batch):
    loss = F.cross_entropy(model(ids), batch["labels"], ignore_index=-7)
    model.backward(loss)
    return loss


def good():
    return torch.tensor([[0, 1], [2, 0], [4, 0], [1, 1]]), torch.tensor([0, 2, -7, 1])


def with_value(which, value):
    ids, labels = good()
    (ids if which == "ids" else labels).view(-1)[-2] = value
    return ids, labels


def made(stages, **config):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2, **config})
    torch.manual_seed(0)
    return smp.DistributedModel(Net())


def run(model, ids, labels, device="cpu"):
    if smp.pp_rank() > 0:
        ids, labels = torch.zeros(4, 0), torch.zeros(4, 0)
    return train(model, ids.to(device), {"labels": labels.to(device)})


def wrong_inputs():
    """First calls and later ones, then a good one: all ranks are still in step."""
    model = made(2)
    found = [refused(lambda: run(model, *with_value("ids", 7)))]
    before = run(model, *good()).reduce_mean().item()
    found.append(refused(lambda: run(model, *with_value("ids", -1))))
    device = backend_here().device
    found.append(refused(lambda: run(model, *with_value("labels", 3), device)))
    return found, before, run(model, *good()).reduce_mean().item()


def test_wrong_inputs_are_refused_before_the_step():
    torch.manual_seed(0)
    ids, labels = good()
    halves = zip(ids.chunk(2), labels.chunk(2), strict=True)
    model = Net()
    losses = [F.cross_entropy(model(i), y, ignore_index=-7).item() for i, y in halves]
    results = run_ranks(wrong_inputs, 2)
    texts = [
        r"argument \[0\]\[1\], microbatch 1, holds index 7, and aten\.embedding in model\.table "
        r"at .*test_check_indices\.py:\d+: return self\.head.* takes indices from 0 to 4\. The",
        r"argument \[0\]\[1\], microbatch 1, holds index -1, and aten\.embedding in model\.table",
        r"argument \[0\]\[2\]\['labels'\], microbatch 1, holds index 3, and aten\.cross_entropy"
        r"_loss in the step function at .*: loss = F\.cross.* from 0 to 2, or -7 \(ignore_index\)",
    ]  # fmt: skip
    for place, text in enumerate(texts):
        check_texts([found[place] for found, _, _ in results], StepError, text)
    for _, before, after in results:
        assert before == pytest.approx(sum(losses) / 2, abs=1e-6)
        assert before == after
    assert results[1][0][0][1].endswith("(found on pp_rank 0)")


def beyond():
    return torch.tensor([[0, 1], [2, 0], [4, 4], [1, 1]]), good()[1]  # a mean of 4 is place 16


def values_made_inside(stages):
    found = []
    for mode in ("inputs", True):
        model = made(stages, check_indices=mode)
        run(model, *good())
        with logged() as lines:
            found.append(refused(lambda m=model: run(m, *beyond())))
            loss = run(model, *good()).reduce_mean().item()
        assert not any("compiled" in line for line in lines), lines
        found.append(loss)
        smp.shutdown()
    model = made(stages, check_indices=False)
    found.append(refused(lambda: run(model, *with_value("ids", 7))))
    return found


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_values_made_inside_are_checked_on_request(stages):
    results = run_ranks(values_made_inside, stages, stages)
    for by_default, loss, asked_for, other_loss, unchecked in results:
        assert by_default == unchecked == ("nothing", "was raised")
        assert loss == other_loss
        check_texts(
            [asked_for],
            StepError,
            r"train: microbatch 1 made index 16, and aten\.embedding in model\.shift at .*: "
            r"return self\.head.* takes indices from 0 to 8\. The step has run, and its gradients",
        )
