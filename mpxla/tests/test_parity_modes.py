"""Training with changes on the way: other lengths, evaluation, dropout, replicas, frozen parts."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.models import (
    NUM_CLASSES,
    Gpt,
    classify,
    conv_net,
    labelled,
    predict_tokens,
    tokens,
)
from mpxla.tests.parity import Plain
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import (
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    ROUNDING,
    assert_close_by_norm,
)

pytestmark = pytest.mark.ranks


def start(model: nn.Module, stages: int, microbatches: int, **config: Any) -> smp.DistributedModel:
    smp.init({"pipeline_parallel_degree": stages, "microbatches": microbatches, **config})
    return smp.DistributedModel(model)


def seeded(build, seed=3):
    torch.manual_seed(seed)
    return build()


def num_compilations() -> int:
    from mpxla.session import current

    return current().backend.num_compilations


class Lines(logging.Handler):
    """Keeps the lines of mpxla's log."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("mpxla").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# --- a second length ----------------------------------------------------------------------------

LENGTHS = (8, 8, 6, 8, 6, 6)


def token_batches():
    torch.manual_seed(5)
    return [tokens(4, length) for length in LENGTHS]


def train_on_two_lengths():
    log = Lines()
    model = start(seeded(Gpt), 2, 2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(predict_tokens)
    losses, compiled = [], []
    for batch in token_batches():
        optimizer.zero_grad()
        before = num_compilations()
        losses.append(step(model, batch)["loss"].reduce_mean().item())
        compiled.append(num_compilations() - before)
        optimizer.step()
    logging.getLogger("mpxla").removeHandler(log)
    return losses, compiled, [line for line in log.lines if "compiled step function" in line]


@pytest.mark.slow
def test_a_second_length_compiles_once_and_says_what_changed():
    results = run_ranks(train_on_two_lengths, 2, timeout_s=120)
    model = Plain(seeded(Gpt), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in token_batches():
        optimizer.zero_grad()
        parts = [{n: t.chunk(2)[mb] for n, t in batch.items()} for mb in range(2)]
        losses = [predict_tokens(model, part)["loss"] for part in parts]
        expected.append(torch.stack(losses).mean().item())
        optimizer.step()
    for losses, compiled, lines in results:
        assert losses == pytest.approx(expected, rel=LOSS)
        # The first call may find its programs: other tests of this process compile them, too.
        assert [count > 0 for count in compiled[1:]] == [False, True, False, False, False]
        assert compiled[2] >= 2
        assert len(lines) == 2
        assert "(first call)" in lines[0]
        assert "changed from int64[2, 8] to int64[2, 6]" in lines[1]
        assert "tokens" in lines[1]


# --- evaluation ---------------------------------------------------------------------------------


def evaluate(model, batch):
    logits = model(batch["x"])
    return {"loss": F.cross_entropy(logits, batch["y"]), "logits": logits}


def image_batches():
    torch.manual_seed(6)
    return [labelled((3, 8, 8), 4) for _ in range(4)]


def with_dropout():
    return nn.Sequential(conv_net(), nn.Dropout(0.4))


def evaluate_and_train():
    """Evaluates first, so that the parts that only training reads are placed without having run."""
    model = start(seeded(with_dropout), 2, 2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    train, test = smp.step(classify), smp.step(evaluate)
    logits, compiled, kept = [], [], []
    for batch in image_batches():
        before = num_compilations()
        model.eval()
        with torch.no_grad():
            logits.append(test(model, batch)["logits"].concat().cpu())
        kept.append([p.grad is not None for p in model.local_parameters()])
        model.train()
        optimizer.zero_grad()
        train(model, batch)
        optimizer.step()
        compiled.append(num_compilations() - before)
    return logits, compiled, kept, model.state_dict()


@pytest.mark.slow
def test_evaluation_comes_first_and_between_training_steps():
    first = seeded(with_dropout).eval()(image_batches()[0]["x"]).detach()
    for logits, compiled, kept, state in run_ranks(evaluate_and_train, 2, timeout_s=120):
        assert_close_by_norm({"logits": logits[0]}, {"logits": first}, OUTPUT)
        assert not torch.equal(logits[1], logits[0])
        assert compiled[0] > 0 and compiled[2:] == [0, 0]
        assert not any(kept[0]) and all(kept[1]), "evaluation makes no gradients and keeps them"
        assert state["0.1.num_batches_tracked"] == 8


def evaluate_with_final_state():
    model = start(seeded(conv_net), 2, 2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    train, test = smp.step(classify), smp.step(evaluate)
    found = []
    for batch in image_batches():
        model.train()
        optimizer.zero_grad()
        train(model, batch)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(test(model, batch)["logits"].concat().cpu())
    return found, model.state_dict()


def test_evaluation_uses_and_keeps_running_statistics():
    model = Plain(seeded(conv_net), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for batch in image_batches():
        model.train()
        optimizer.zero_grad()
        for mb in range(2):
            classify(model, {n: t.chunk(2)[mb] for n, t in batch.items()})
        optimizer.step()
        model.eval()
        with torch.no_grad():
            expected.append(model(batch["x"]))
    for found, state in run_ranks(evaluate_with_final_state, 2, timeout_s=120):
        for got, want in zip(found, expected, strict=True):
            assert_close_by_norm({"logits": got}, {"logits": want}, OUTPUT)
        assert_close_by_norm(state, model.module.state_dict(), PARAMETER, floor=ROUNDING)


# --- dropout ------------------------------------------------------------------------------------

DROP = 0.25


class Dropped(nn.Module):
    """Drops every layer's weight, so that weights' gradients show the masks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(4000))
        self.second = nn.Parameter(torch.ones(4000))
        self.between = nn.Linear(4000, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [B] -> [W], [W]
        first = F.dropout(self.first, DROP, self.training)
        link = torch.tanh(self.between(first)) * 0.0
        return first + 0.0 * x.sum(), F.dropout(self.second + link, DROP, self.training)


def sum_of_masks(model, x):
    first, second = model(x)
    model.backward(first.sum() + second.sum())
    return first, second


def look_at_masks():
    model = start(seeded(Dropped), 2, 3)
    step = smp.step(sum_of_masks)
    seen = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            model.zero_grad()
            first, second = step(model, torch.zeros(3))
            seen.append((first.stack().cpu(), second.stack().cpu()))
    gradients = {n: p.grad.cpu() for n, p in model.local_named_parameters()}
    return seen, gradients, model.partition_report()


@pytest.fixture(scope="module")
def masks_of_ranks():
    return run_ranks(look_at_masks, 2, timeout_s=120)


def test_dropout_draws_its_own_mask_for_every_microbatch_and_stage(masks_of_ranks):
    results = masks_of_ranks
    gradients = {name: value for _, part, _ in results for name, value in part.items()}
    seen = results[0][0]
    for other, _, _ in results:
        for (a, b), (c, d) in zip(seen, other, strict=True):
            assert torch.equal(a, c) and torch.equal(b, d)
    masks = [mask for first, second in seen[:4] for mask in (*first, *second)]
    for mask in masks:
        dropped = (mask == 0).float().mean().item()
        assert dropped == pytest.approx(DROP, abs=0.04)  # 6 standard deviations
        assert torch.allclose(mask[mask != 0], torch.tensor(1 / (1 - DROP)))
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            both = ((mask == 0) & (other == 0)).float().mean().item()
            assert both == pytest.approx(DROP**2, abs=0.03)  # independent
    first, second = seen[-1]
    assert torch.allclose(gradients["first"], first.mean(dim=0), atol=1e-6)
    assert torch.allclose(gradients["second"], second.mean(dim=0), atol=1e-6)


def test_dropout_replays_from_torch_manual_seed(masks_of_ranks):
    seen, _, _ = masks_of_ranks[0]
    for again, before in zip(seen[4:], seen[:2], strict=True):
        assert torch.equal(again[0], before[0]) and torch.equal(again[1], before[1])
    assert not torch.equal(seen[0][0], seen[2][0])


def losses_with_dropout(seeds):
    """Per seed, the losses of three steps from the same start; then those of an evaluation."""
    raw = seeded(partial(Gpt, dropout=0.3))
    values = {name: value.clone() for name, value in raw.state_dict().items()}
    model = start(raw, 3, 3)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(predict_tokens)
    torch.manual_seed(4)
    batch = {name: value.repeat(3, 1) for name, value in tokens(2).items()}
    found, compiled = [], []
    for seed in seeds:
        if found:
            model.load_state_dict(values)
        torch.manual_seed(seed)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            before = num_compilations()
            losses.append([loss.item() for loss in step(model, batch)["loss"].outputs])
            compiled.append(num_compilations() - before)
            optimizer.step()
        found.append(losses)
    model.eval()
    with torch.no_grad():
        calm = [loss.item() for loss in smp.step(predict_without_backward)(model, batch).outputs]
    return found, compiled, calm


def predict_without_backward(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


@pytest.mark.slow
def test_training_with_dropout_replays_and_compiles_nothing_new():
    results = run_ranks(losses_with_dropout, 3, (7, 7, 8), timeout_s=120)
    (losses, again, other), _, calm = results[0]
    assert again == losses
    assert other != losses
    assert all(len(set(step)) == 3 for step in losses), "microbatches are equal, masks must not be"
    assert len(set(calm)) == 1
    assert all(compiled[1:] == [0] * 8 for _, compiled, _ in results)


# --- replicas -----------------------------------------------------------------------------------


def replica_batch(replica):
    torch.manual_seed(50 + replica)
    return tokens(4)


def gradients_of_replicas():
    model = start(seeded(Gpt, smp_rank_seed()), 2, 2, ddp=True)
    smp.step(predict_tokens)(model, replica_batch(smp.dp_rank()))
    return {n: p.grad.cpu() for n, p in model.local_named_parameters()}


def smp_rank_seed() -> int:
    """Replicas start with other values; those of the first one count."""
    import os

    return 3 if int(os.environ["RANK"]) in (0, 1) else 4


@pytest.mark.slow
def test_replicas_train_on_the_mean_of_their_gradients():
    results = run_ranks(gradients_of_replicas, 4, timeout_s=120)
    model = Plain(seeded(Gpt), 4)
    for replica in range(2):
        for mb in range(2):
            batch = {n: t.chunk(2)[mb] for n, t in replica_batch(replica).items()}
            predict_tokens(model, batch)
    expected = {n: p.grad for n, p in model.module.named_parameters()}
    held = {}
    for part in results:
        for name, value in part.items():
            assert torch.equal(held.setdefault(name, value), value), name
    assert_close_by_norm(held, expected, GRADIENT, floor=ROUNDING)


# --- what gets no gradient ----------------------------------------------------------------------


class Partly(nn.Module):
    """A frozen layer, a layer that is not called, and one whose result the loss does not use."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(12, 16).requires_grad_(False)
        self.used = nn.Linear(16, 16)
        self.left_out = nn.Linear(3, 3)
        self.aside = nn.Linear(16, 2)
        self.leave = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.used(torch.tanh(self.frozen(x))))
        return self.leave(x), self.aside(x)


def classify_with_aside(model, batch):
    logits, aside = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    model.backward(loss)
    return loss, aside


def gradients_of_parts(num_calls):
    model = start(seeded(Partly), 2, 2)
    torch.manual_seed(9)
    step = smp.step(classify_with_aside)
    for _ in range(num_calls):
        _, aside = step(model, labelled((12,), 4))
    gradients = {
        n: None if p.grad is None else p.grad.cpu() for n, p in model.local_named_parameters()
    }
    return gradients, aside.concat().cpu()


@pytest.mark.parametrize("num_calls", [1, 2], ids=["one call", "two calls add up"])
def test_gradients_are_there_exactly_where_plain_torch_has_them(num_calls):
    results = run_ranks(gradients_of_parts, 2, num_calls, timeout_s=120)
    model = Plain(seeded(Partly), 2)
    torch.manual_seed(9)
    for _ in range(num_calls):
        batch = labelled((12,), 4)
        asides = [
            classify_with_aside(model, {n: t.chunk(2)[mb] for n, t in batch.items()})[1]
            for mb in range(2)
        ]
    expected = {n: p.grad for n, p in model.module.named_parameters()}
    found = {name: value for part, _ in results for name, value in part.items()}
    assert {n for n, g in found.items() if g is None} == {
        n for n, g in expected.items() if g is None
    }
    assert_close_by_norm(
        {n: g for n, g in found.items() if g is not None},
        {n: g for n, g in expected.items() if g is not None},
        GRADIENT,
        floor=ROUNDING,
    )
    for _, aside in results:
        assert_close_by_norm({"aside": aside}, {"aside": torch.cat(asides).detach()}, OUTPUT)


# --- placement at creation ----------------------------------------------------------------------


class Returning(nn.Module):
    """Created for ranks 0, 1, 0, and inside the middle for 1 and 0 again: the innermost counts."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(12, 16)
        with smp.partition(1):
            self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            with smp.partition(0):
                self.inner = nn.Linear(16, 16)
        self.leave = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.inner(self.middle(torch.tanh(self.enter(x))))))


def train_returning():
    model = start(seeded(Returning), 2, 4, auto_partition=False, default_partition=0)
    torch.manual_seed(9)
    smp.step(classify)(model, labelled((12,), 8))
    gradients = {n: p.grad.cpu() for n, p in model.local_named_parameters()}
    return gradients, model._engine.first_cuts[model.label].placement


def test_modules_live_where_they_were_created_for():
    results = run_ranks(train_returning, 2, timeout_s=120)
    assert [placement for _, placement in results] == [(0, 1, 0)] * 2
    assert sorted(results[1][0]) == ["middle.0.bias", "middle.0.weight"]
    model = Plain(seeded(Returning), 4)
    torch.manual_seed(9)
    batch = labelled((12,), 8)
    for mb in range(4):
        classify(model, {n: t.chunk(4)[mb] for n, t in batch.items()})
    expected = {n: p.grad for n, p in model.module.named_parameters()}
    assert_close_by_norm({**results[0][0], **results[1][0]}, expected, GRADIENT, floor=ROUNDING)
