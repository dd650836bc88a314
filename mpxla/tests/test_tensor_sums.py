"""Tensors that step functions add up outside of the model: the sums are those of PyTorch."""

import copy
from collections import defaultdict

import pytest
import torch
import torch.utils._pytree as pytree

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import Net, close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES, NUM_STEPS, LEVEL = 3, 2, 1.4
functional = torch.nn.functional
total, held = 0.0, torch.zeros(())


class Meter:
    """As training scripts have it."""

    def __init__(self):
        self.sum, self.count, self.mean = 0, 0, 0
        self.held = torch.zeros(())
        self.parts, self.losses = {"loss": 0.0}, []

    def update(self, value, count):
        self.sum += value * count
        self.count += count
        self.mean = self.sum / self.count
        self.held += value
        self.parts["loss"] += value
        self.losses.append(value)


def in_dictionary():
    sums = {"loss": 0.0, "count": 0, "parts": {"scores": 0.0}}

    def add(loss, scores):
        sums["loss"] += loss.detach()
        sums["count"] += len(scores)
        sums["parts"]["scores"] += scores.detach().mean(0)

    return add, lambda: sums


def in_closure():
    mean, first = 0.0, [0.0, 0.0]

    def add(loss, scores):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss
        first[0] -= loss.detach() * 2
        first[1] = loss.detach() + first[1]

    return add, lambda: (mean, first)


def in_globals():
    global total, held
    total, held = 0.0, torch.zeros(())

    def add(loss, scores):
        global total, held
        total = total + loss.detach()
        held += loss.detach()

    return add, lambda: (total, held)


def in_new_entries():
    sums, others = {}, defaultdict(float)

    def add(loss, scores):
        for name, value in {"loss": loss, "scores": scores.mean()}.items():
            sums[name] = sums.get(name, 0) + value.detach()
            others[name] += value.detach()

    return add, lambda: (sums, dict(others))


def in_meter():
    meter = Meter()

    def add(loss, scores):
        meter.update(loss.detach(), len(scores))

    return add, lambda: vars(meter)


def in_tensors():
    sums = {"loss": torch.zeros(()), "scores": torch.zeros(3)}
    scores_of_all = sums["scores"]

    def add(loss, scores):
        sums["loss"] += loss.detach()
        sums["scores"] += scores.detach().mean(0)

    return add, lambda: (sums, scores_of_all)


def in_texts():
    lines, text, last = [], "", {"count": 0, "line": ""}

    def add(loss, scores):
        nonlocal text
        lines.append(f"loss {loss.item():.3f} and {loss:.2f}")
        text += f"{scores.mean().item():.2f}, "
        last["count"] += 1
        last["line"] = f"{last['count']}: {loss.item():8.3f}"

    return add, lambda: (lines, text, last)


def on_a_way():
    sums = {"loss": 0.0}

    def add(loss, scores):
        if loss > LEVEL:
            sums["loss"] += loss.detach()

    return add, lambda: sums


def least_tensor():
    least = {"loss": torch.tensor(1e9)}

    def add(loss, scores):
        if loss < least["loss"]:
            least["loss"] = loss.detach()

    return add, lambda: least


KINDS = [in_dictionary, in_closure, in_globals, in_new_entries, in_meter, in_tensors]
KINDS += [in_texts, on_a_way, least_tensor]


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(4 * MICROBATCHES, 5, generator=generator)
    return x, torch.randint(3, (4 * MICROBATCHES,), generator=generator)


def step_of(model, add, backward):
    def step(x, y):
        scores = model(x)
        loss = functional.cross_entropy(scores, y)
        backward(loss)
        add(loss, scores)
        return loss

    return step


def seen(look):
    return copy.deepcopy(pytree.tree_map_only(torch.Tensor, lambda v: v.detach().cpu(), look()))


def train_plainly(kind):
    torch.manual_seed(3)
    model, (add, look), found = Net(), kind(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = step_of(model, add, lambda loss: (loss / MICROBATCHES).backward())
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(MICROBATCHES) for v in batch(number)), strict=True):
            step(x, y)
        optimizer.step()
        found.append(seen(look))
    return found, host(model.state_dict().items())


def train(stages, kinds):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    trained = []
    for kind in kinds:
        torch.manual_seed(3)
        model, (add, look), found = smp.DistributedModel(Net()), kind(), []
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
        step = smp.step(step_of(model, add, model.backward))
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            step(*batch(number))
            optimizer.step()
            found.append(seen(look))
        trained.append((found, host(model.state_dict().items())))
    return trained


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        ([in_dictionary, in_globals, in_new_entries, in_meter, in_texts], 2),
        *(pytest.param(KINDS, stages, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_sums_are_those_of_pytorch(kinds, stages):
    for trained in run_ranks(train, stages, stages, kinds):
        for kind, (found, state) in zip(kinds, trained, strict=True):
            expected, parameters = train_plainly(kind)
            pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
            for value, wanted in pairs:
                assert type(value) is type(wanted)
                if isinstance(value, str):
                    assert value == wanted
                else:
                    close(value, wanted)
            close(state, parameters)


def used(begin, is_returned):
    def kind():
        sums = {"loss": begin}

        def add(loss, scores):
            sums["loss"] += loss.detach()
            return sums["loss"]

        return add

    def step_of_kind(model):
        add = kind()

        def step(x, y):
            scores = model(x)
            loss = functional.cross_entropy(scores, y)
            found = add(loss, scores)
            model.backward(loss if is_returned else loss / (1 + found))
            return found

        return step

    return step_of_kind


def refuse():
    smp.init({"microbatches": 2})
    texts = []
    for begin in (0.0, torch.zeros(())):
        for is_returned in (False, True):
            model = smp.DistributedModel(Net())
            step = smp.step(used(begin, is_returned)(model))
            with pytest.raises(CaptureError) as caught:
                step(*(v[:8] for v in batch(0)))
            texts.append(str(caught.value))
    return texts


def test_a_step_that_goes_by_its_sum_is_refused():
    (texts,) = run_ranks(refuse, 1)
    for text in texts[:2]:
        assert "reads sums['loss'], and gives it a tensor, which the next microbatch" in text
        assert "Only what the step does not go by may be added up" in text
    for text in texts[2:]:
        assert "writes to a tensor that no DistributedModel holds" in text
        assert "test_tensor_sums.py" in text
