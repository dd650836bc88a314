"""Arrays and objects of the model that a step leaves in Python or returns: those of PyTorch."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import data, raw_model, start
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 2


@dataclasses.dataclass
class Record:
    loss: float
    more: object = None


class Store:
    def __init__(self):
        self.last, self.total, self.rows = None, 0.0, None


seen, store = [], Store()


def predictions(y, x):
    seen.append(y.detach().cpu().numpy())
    seen.append(y.argmax(1, keepdim=True).numpy())
    return y.argmax(-1).numpy()


def accuracy(y, x):
    is_right = y.argmax(1).numpy() == x.argmax(1).numpy()
    store.total += float(is_right.mean())
    return is_right.mean(), float(is_right.sum()), f"{is_right.mean():.2f}"


def computed(y, x):
    logits = y.detach().numpy()
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares = powers / powers.sum(1, keepdims=True)
    return {"shares": shares, "x": np.concatenate([shares, x.numpy()], 1)[:, :-1], "n": len(logits)}


def chosen(y, x):
    logits = y.detach().numpy()
    return logits[np.arange(len(logits)), x.argmax(1).numpy() % 3], np.where(logits > 0, logits, 0)


def looped(y, x):
    for row, at in zip(y.detach().numpy(), x.argmax(1).numpy(), strict=True):
        seen.append((row.sum(), at))
    return tuple(row.mean().item() for row in y.detach().numpy())


def gathered(y, x):
    rows = y.detach().numpy()
    store.rows = rows if store.rows is None else np.concatenate([store.rows, rows])
    store.last = rows
    return rows.shape


def used_in_the_step(y, x):
    largest = x.numpy().max()
    scale = torch.tensor(np.cumsum(x.numpy(), 1))
    return (y * scale[:, :3]).sum() * float(largest)


def objects(y, x):
    seen.append(Record(y.mean().item(), np.int64(len(x))))
    seen.append((Path("a"), y.dtype, [Record(0.0, y.detach())]))
    store.last = Record(y.sum().item(), {"device": 2j})
    store.rows = y.detach().mean() + torch.zeros(300, 300)  # large, of which a warning tells
    return Record(y.max().item(), f"{y.mean().item():.3f}")


def numbers(y, x):
    mean = y.mean().item()
    return np.array([mean, 1.0]), np.round(mean, 3), str(y.argmax().numpy())


KINDS = [predictions, accuracy, computed, chosen, looped, gathered, used_in_the_step, objects]
KINDS += [numbers]


def clear():
    seen.clear()
    vars(store).update(vars(Store()))


def left():
    return [*seen], dict(vars(store))


def by_microbatch(value, place):
    """What one microbatch has returned."""
    if isinstance(value, smp.StepOutput):
        return value.outputs[place]
    if dataclasses.is_dataclass(value):
        return type(value)(**{k: by_microbatch(v, place) for k, v in vars(value).items()})
    if isinstance(value, dict):
        return {key: by_microbatch(part, place) for key, part in value.items()}
    return (
        tuple(by_microbatch(v, place) for v in value) if isinstance(value, tuple) else value[place]
    )


def train(stages):
    found = {}
    for kind in KINDS:
        start(pipeline_parallel_degree=stages)
        model = smp.DistributedModel(raw_model())
        clear()
        step = smp.step(lambda model, x, kind=kind: kind(model(x), x))
        calls = [step(model, data(seed)[0]) for seed in range(NUM_STEPS)]
        returned = [by_microbatch(call, place) for call in calls for place in range(2)]
        found[kind.__name__] = returned, left()
    return found


def train_plainly(kind):
    model = raw_model()
    clear()
    parts = [part for seed in range(NUM_STEPS) for part in data(seed)[0].chunk(2)]
    return [kind(model(part), part) for part in parts], left()


def same(one, other):
    """Fails where the two differ in more than rounding, in kinds of numbers too."""
    assert type(one) is type(other) or isinstance(one, (torch.Tensor, np.number)), (one, other)
    if dataclasses.is_dataclass(one):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        one, other = [*one.values()], [*other.values()]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, (np.ndarray, np.number)):
        assert one.dtype == np.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one.detach(), other.cpu())
    else:
        assert one == pytest.approx(other, rel=1e-4) if isinstance(one, float) else one == other


@pytest.mark.parametrize("stages", [1, 2])
def test_arrays_and_objects_are_there_when_the_step_has_run(stages):
    for found in run_ranks(train, stages, stages):
        for kind in KINDS:
            same(train_plainly(kind), found[kind.__name__])


def in_place(y, x):
    array = y.detach().numpy()
    array[0] = 0
    return array


def decided(y, x):
    return y * 2 if y.detach().numpy().std() > 1e9 else y


def beside_an_object(y, x):
    seen.append((object(), y.mean().item()))


REFUSED = {
    in_place: "depends on a tensor's value in Python at .*array\\[0\\] = 0",
    decided: "depends on a tensor's value in Python at .*std",
    beside_an_object: "leaves what the model has computed in seen, beside an object of type obj",
}


def refuse():
    start(pipeline_parallel_degree=1)
    model = smp.DistributedModel(raw_model())
    texts = []
    for kind in REFUSED:
        clear()
        step = smp.step(lambda model, x, kind=kind: kind(model(x), x))
        with pytest.raises(CaptureError) as caught:
            step(model, data()[0])
        texts.append(str(caught.value))
    return texts


def test_what_has_no_value_yet_is_refused_where_it_is_needed():
    (texts,) = run_ranks(refuse, 1)
    for text, expected in zip(texts, REFUSED.values(), strict=True):
        assert re.search(expected, text), text
