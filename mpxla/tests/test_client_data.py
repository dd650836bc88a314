"""What SMP scripts rely on: inputs of steps, what steps return, and how they are decorated.

The numbers are those of the list of client behaviours. Every function above a test is a small
training script as those programs write it; it runs on every rank and returns what it saw.
"""

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.clients import (
    BATCH,
    close,
    data,
    gradients,
    merged,
    plain_gradients,
    plain_training,
    raw_model,
    start,
    train_step,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


# 1


def feed_dummies():
    smp = start()
    model = smp.DistributedModel(raw_model())
    step = smp.step(train_step)
    x, y = data()
    if smp.pp_rank() > 0:
        x, y = torch.zeros(BATCH, 0), torch.full((BATCH, 0), 77)
    loss = step(model, x, y).reduce_mean().item()
    return loss, gradients(model)


def test_01_only_the_inputs_of_pp_rank_0_count():
    results = run_ranks(feed_dummies, 2)
    (expected,), _ = plain_training(1)
    close([loss for loss, _ in results], [expected, expected])
    close(merged(found for _, found in results), plain_gradients(0))


# 2


def broadcast_in_pipeline():
    smp = start()
    if smp.pp_rank() == 0:
        smp.broadcast({"ids": torch.arange(3), "text": "a"}, smp.PP_GROUP)
        return None
    received = smp.recv_from(0, smp.RankType.PP_RANK)
    return received["ids"].tolist(), received["text"]


def test_02_broadcast_is_received_by_recv_from():
    assert run_ranks(broadcast_in_pipeline, 2) == [None, ([0, 1, 2], "a")]


# 7, 8


def return_structures():
    from transformers.modeling_outputs import SequenceClassifierOutput

    smp = start()
    model = smp.DistributedModel(raw_model())

    @smp.step
    def as_tuple(model, x):
        logits = model(x)
        return logits, [logits.argmax(-1), "name", None]

    @smp.step
    def as_dict(model, x):
        return {"logits": model(x), "nested": {"sum": model(x).sum()}}

    @smp.step
    def as_model_output(model, x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    x, y = data()
    logits, (classes, *rest) = as_tuple(model, x)
    named, output = as_dict(model, x), as_model_output(model, x, y)
    assert isinstance(output, SequenceClassifierOutput)
    assert output["logits"] is output.logits
    assert {type(v) for v in (logits, classes, named["logits"], output.loss)} == {smp.StepOutput}
    return {
        "tuple": [v.cpu() for v in logits.outputs],
        "classes": classes.concat().cpu(),
        "rest": rest,
        "dict": named["logits"].concat().cpu(),
        "sum": named["nested"]["sum"].stack().cpu(),
        "output": [v.cpu() for v in output["logits"].outputs],
        "loss": output.loss.reduce_mean().cpu(),
    }


def test_07_structures_come_back_with_step_outputs():
    x, y = data()
    with torch.no_grad():
        logits = raw_model()(x)
    parts = list(logits.split(2))
    for found in run_ranks(return_structures, 2):
        close(found["tuple"], parts)
        assert found["classes"].tolist() == logits.argmax(-1).tolist()
        assert found["rest"] == ["name", None]
        close(found["dict"], logits)
        close(found["sum"], torch.stack([part.sum() for part in parts]))
        close(found["output"], parts)
        close(found["loss"], F.cross_entropy(logits, y))


def return_numbers():
    smp = start()
    model = smp.DistributedModel(raw_model())

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss.item(), len(x)

    losses, sizes = step(model, *data())
    return losses, sum(losses), sizes


def test_08_numbers_come_back_as_lists_over_microbatches():
    x, y = data()
    with torch.no_grad():
        logits = raw_model()(x)
    expected = [F.cross_entropy(a, b).item() for a, b in zip(logits.split(2), y.split(2))]  # noqa: B905
    for losses, total, sizes in run_ranks(return_numbers, 2):
        assert isinstance(losses, list)
        close(losses, expected)
        close(total, sum(expected))
        assert sizes == [2, 2]


# 9


def pass_everything():
    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.1))
    seen: list[Any] = []

    @smp.step
    def step(args, model, batch, count, nothing, criterion, optimizer, **kwargs):
        seen.append((args, count, nothing, criterion, optimizer, kwargs["flag"]))
        assert batch["x"].shape == (2, 5)
        assert kwargs["extra"]["weights"].shape == (2, 1)
        logits = model(batch["x"]) * kwargs["extra"]["weights"]
        loss = criterion(logits, batch["y"]) * count * args.scale
        model.backward(loss)
        return loss

    x, y = data()
    args, criterion = Namespace(scale=0.5), nn.CrossEntropyLoss()
    extra = {"weights": torch.arange(1.0, 1 + BATCH)[:, None], "names": ["a"]}
    batch = {"x": x, "y": y}
    loss = step(args, model, batch, 3, None, criterion, optimizer, extra=extra, flag="on")
    for found in seen:
        assert found == (args, 3, None, criterion, optimizer, "on")
    assert seen
    return loss.reduce_mean().item()


def test_09_containers_are_split_and_all_else_passes_through():
    x, y = data()
    weights = torch.arange(1.0, 1 + BATCH)[:, None]
    with torch.no_grad():
        expected = F.cross_entropy(raw_model()(x) * weights, y).item() * 3 * 0.5
    close(run_ranks(pass_everything, 2), [expected, expected])


# 10


def decorate_in_every_way():
    smp = start()
    model = smp.DistributedModel(raw_model())

    @smp.step
    def bare(model, x):
        return model(x).sum()

    @smp.step()
    def called(model, x):
        return model(x).sum()

    class Trainer:
        factor = 2.0

        @smp.step
        def unbound(model, x):  # noqa: N805 - a step function as scripts have it in a class body
            return model(x).sum()

        @smp.step
        def bound(self, model, x):
            return model(x).sum() * self.factor

        def run(self, x):
            return self.unbound(model, x), self.bound(model, x)

    x, _ = data()
    outputs = [bare(model, x), called(model, x), *Trainer().run(x)]
    assert bare.__name__ == "bare"
    return [output.reduce_sum().item() for output in outputs]


def test_10_step_is_used_bare_called_and_in_a_class_body():
    with torch.no_grad():
        total = raw_model()(data()[0]).sum().item()
    for found in run_ranks(decorate_in_every_way, 2):
        close(found, [total, total, total, 2 * total])
