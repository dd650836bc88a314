"""What existing SMP training scripts rely on, one test for each behaviour.

The numbers are those of the list of client behaviours. Every function above a test is a small
training script as those programs write it; it runs on every rank and returns what it saw.
"""

import contextlib
import logging
import warnings
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks

BATCH = 4
REPLICAS = {"pipeline_parallel_degree": 1, "ddp": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 5, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def raw_model():
    torch.manual_seed(3)
    return Net()


def start(**config):
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    return smp


def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def host(values):
    return {name: value.detach().cpu() for name, value in values}


def gradients(model):
    return host((name, p.grad) for name, p in model.local_named_parameters())


def full_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain_training(num_steps, optimizer_type=torch.optim.SGD, lr=0.5, seeds=None):
    """Losses and final parameters of the plain model."""
    model = raw_model()
    optimizer = optimizer_type(model.parameters(), lr=lr)
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        x, y = data(number if seeds is None else seeds[number])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, host(model.named_parameters())


def plain_gradients(*seeds):
    """Mean over batches of the plain model's gradients."""
    model = raw_model()
    for seed in seeds:
        x, y = data(seed)
        (F.cross_entropy(model(x), y) / len(seeds)).backward()
    return host((name, p.grad) for name, p in model.named_parameters())


def merged(parts):
    """What all ranks hold, together; every name is held somewhere."""
    together: dict[str, torch.Tensor] = {}
    for part in parts:
        together.update(part)
    return together


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)


class Lines(logging.Handler):
    """Collects what mpxla logs."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def logged():
    from mpxla.log import get_logger

    lines = Lines()
    get_logger().addHandler(lines)
    try:
        yield lines.lines
    finally:
        get_logger().removeHandler(lines)


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


# 3, 4


def train_with_optimizer(is_built_before):
    smp = start()
    raw = raw_model()
    if is_built_before:
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.02)
        model = smp.DistributedModel(raw)
    else:
        model = smp.DistributedModel(raw)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = smp.DistributedOptimizer(optimizer)
    step, losses = smp.step(train_step), []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(step(model, *data(number)).reduce_mean().item())
        optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    local = list(model.local_parameters())
    assert [id(p) for p in held] == [id(p) for p in local]
    assert len(local) == 2
    return losses, host(model.local_named_parameters())


@pytest.mark.parametrize("is_built_before", [True])
def test_03_optimizer_of_the_raw_model_before_wrapping(is_built_before):
    check_training(run_ranks(train_with_optimizer, 2, is_built_before))


@pytest.mark.parametrize("is_built_before", [False])
def test_04_optimizer_of_the_distributed_model_before_partitioning(is_built_before):
    check_training(run_ranks(train_with_optimizer, 2, is_built_before))


def check_training(results):
    losses, state = plain_training(3, torch.optim.AdamW, 0.02)
    for found, _ in results:
        close(found, losses)
    close(merged(part for _, part in results), state)


# 5, 6


def schedule_wrapped():
    from transformers import get_scheduler

    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    step = smp.step(train_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        rates = train_with_scheduler(model, optimizer, step, steps)
        linear = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)
        rates += train_with_scheduler(model, optimizer, step, linear)
    return isinstance(optimizer, torch.optim.Optimizer), rates, full_state(model)


def schedule_inner():
    smp = start()
    raw = raw_model()
    inner = torch.optim.SGD(raw.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
        model = smp.DistributedModel(raw)
        optimizer = smp.DistributedOptimizer(inner)
        rates = train_with_scheduler(model, optimizer, smp.step(train_step), scheduler)
    return rates, full_state(model)


def train_with_scheduler(model, optimizer, step, scheduler):
    rates = []
    for number in range(2):
        optimizer.zero_grad()
        step(model, *data(number))
        optimizer.step()
        scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]))
    return rates


def plain_scheduled(schedulers):
    model = raw_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for make in schedulers:
        scheduler = make(optimizer)
        for number in range(2):
            optimizer.zero_grad()
            x, y = data(number)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return host(model.named_parameters())


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_05_schedulers_on_the_wrapped_optimizer():
    from transformers import get_scheduler

    def linear(optimizer):
        return get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)

    expected = plain_scheduled([halving, linear])
    for is_optimizer, rates, state in run_ranks(schedule_wrapped, 2):
        assert is_optimizer
        assert rates[:2] == [(0.25, 0.25), (0.125, 0.125)]
        # Schedulers start from the rate that the first one of an optimizer has found there.
        assert rates[2:] == [(0.375, 0.375), (0.25, 0.25)]
        close(state, expected)


def test_06_scheduler_on_the_inner_optimizer_before_wrapping():
    expected = plain_scheduled([halving])
    for rates, state in run_ranks(schedule_inner, 2):
        assert rates == [(0.25, 0.25), (0.125, 0.125)]
        close(state, expected)


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


# 11


class Dropping(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def evaluate_between_steps():
    smp = start()
    torch.manual_seed(3)
    raw = Dropping()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    train = smp.step(train_step)

    @smp.step
    def evaluate(model, x, y):
        logits = model(x)
        return F.cross_entropy(logits, y, reduction="sum"), logits.requires_grad

    found = []
    for number in range(2):
        model.train()
        optimizer.zero_grad()
        train(model, *data(number))
        before = gradients(model)
        model.eval()
        with torch.no_grad():
            loss, has_grad = evaluate(model, *data(9))
        assert has_grad is False or has_grad == [False, False]
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, before[name]), "evaluation left gradients alone"
        found.append((loss.reduce_sum().item(), full_state(model)))
        optimizer.step()
    return found


def test_11_evaluation_between_training_steps():
    x, y = data(9)
    results = run_ranks(evaluate_between_steps, 2)
    for found in results:
        for loss, state in found:
            model = Net()
            model.load_state_dict(state)
            with torch.no_grad():
                close(loss, F.cross_entropy(model(x), y, reduction="sum").item())
    first, second = results[0]
    assert first[0] != second[0]


# 12


def evaluate_on_rank_0():
    smp = start(**REPLICAS)
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    train = smp.step(train_step)

    @smp.step
    def evaluate(model, x, y):
        return F.cross_entropy(model(x), y)

    losses = []
    for number in range(2):
        if smp.rank() == 0:
            with torch.no_grad():
                losses.append(evaluate(model, *data(9)).reduce_mean().item())
        optimizer.zero_grad()
        train(model, *data(2 * number + smp.dp_rank()))
        optimizer.step()
    return losses, full_state(model)


def test_12_evaluation_on_rank_0_only_with_one_partition():
    (losses, state), (none, same) = run_ranks(evaluate_on_rank_0, 2)
    model, x_y = raw_model(), data(9)
    expected = []
    for number in range(2):
        with torch.no_grad():
            expected.append(F.cross_entropy(model(x_y[0]), x_y[1]).item())
        model.zero_grad()
        for seed in (2 * number, 2 * number + 1):
            x, y = data(seed)
            (F.cross_entropy(model(x), y) / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    close(losses, expected)
    assert none == []
    close(state, host(model.named_parameters()))
    assert all(torch.equal(state[name], same[name]) for name in state)


# 13


def initialize_twice():
    import mpxla as smp

    assert not smp.is_initialized()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    with logged() as lines:
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 8})
    loss = smp.step(train_step)(model, *data()).reduce_mean().item()
    return lines, smp.pp_size(), smp.num_microbatches(), smp.state.cfg.microbatches, loss


def test_13_second_init_warns_and_changes_nothing():
    text = "WARNING: smp.init() was called again; the second call changes nothing."
    (expected,), _ = plain_training(1)
    for lines, *values, loss in run_ranks(initialize_twice, 2):
        assert lines == [text]
        assert values == [2, 2, 2]
        close(loss, expected)


# 14


def use_torch_distributed():
    smp = start(ddp=True)
    dist.barrier()
    total = torch.tensor([1.0 + smp.rank()])
    dist.all_reduce(total)
    sampler = torch.utils.data.DistributedSampler(range(4), shuffle=False)
    same = torch.tensor(float(smp.rank()))
    dist.all_reduce(same, group=smp.get_mp_process_group())
    alone = torch.tensor(float(smp.rank()))
    dist.all_reduce(alone, group=smp.get_dp_process_group())
    return dist.get_rank(), dist.get_world_size(), total.item(), list(sampler), same.item(), alone


def test_14_init_creates_the_default_process_group():
    assert run_ranks(use_torch_distributed, 2) == [
        (0, 2, 3.0, [0, 2], 1.0, torch.tensor(0.0)),
        (1, 2, 3.0, [1, 3], 1.0, torch.tensor(1.0)),
    ]


# 15


class WithoutParametersAtTheEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.activation = nn.Tanh()

    def forward(self, x):
        return self.activation(self.body(x))


def train_with_empty_rank():
    smp = start(auto_partition=False, default_partition=0)
    torch.manual_seed(3)
    raw = WithoutParametersAtTheEnd()
    model = smp.DistributedModel(raw)
    smp.set_partition(raw.activation, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(raw.parameters(), lr=0.1))
    step, losses = smp.step(train_step), []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(model, *data()).reduce_mean().item())
        if len(list(model.local_parameters())) > 0:
            optimizer.step()
    optimizer.step()  # harmless where there is nothing to update
    return len(list(model.local_parameters())), losses


def test_15_a_rank_may_own_no_parameter():
    torch.manual_seed(3)
    model, losses = WithoutParametersAtTheEnd(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = data()
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    (num_first, first), (num_second, second) = run_ranks(train_with_empty_rank, 2)
    assert (num_first, num_second) == (4, 0)
    close(first, losses)
    close(second, losses)


# 16


def run_hooks():
    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    events: list[Any] = []
    optimizer = None

    def partitioned(model, given):
        names = [name for name, _ in model.local_named_parameters()]
        events.append(
            ("partition", given is optimizer, model.partitioned, names, raw.first.weight.grad)
        )

    model.register_post_partition_hook(partitioned)
    handle = model.register_post_partition_hook(lambda model, optimizer: events.append("never"))
    handle.remove()
    model.register_post_step_hook(
        lambda model, given: events.append(("step", given is optimizer, bool(gradients(model))))
    )
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.1))
    assert not model.partitioned
    step = smp.step(train_step)
    step(model, *data())
    step(model, *data())
    return events


def test_16_hooks_run_after_partitioning_and_after_steps():
    for rank, events in enumerate(run_ranks(run_hooks, 2)):
        part = ("first", "second")[rank]
        names = [f"{part}.weight", f"{part}.bias"]
        assert events == [
            ("partition", True, True, names, None),
            ("step", True, True),
            ("step", True, True),
        ]


# 17


def reach_the_module():
    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    smp.step(train_step)(model, *data())
    return model.get_module() is raw, model.module is raw, type(model.module).__name__


def test_17_the_users_module_can_be_reached():
    assert run_ranks(reach_the_module, 2) == [(True, True, "Net")] * 2


# 21


def gather_over_replicas():
    smp = start(**REPLICAS)
    numbers = smp.allgather(1.5 + smp.rank(), smp.DP_GROUP)
    tensors = smp.allgather(torch.full((2,), smp.rank()), smp.CommGroup.DP_GROUP)
    on_device = smp.allgather(torch.ones(1).to("xla") * smp.rank(), smp.DP_GROUP)
    return numbers, [t.tolist() for t in tensors], [t.cpu().tolist() for t in on_device]


def test_21_allgather_of_numbers_and_tensors():
    expected = ([1.5, 2.5], [[0, 0], [1, 1]], [[0.0], [1.0]])
    assert run_ranks(gather_over_replicas, 2) == [expected] * 2


# 22


def accumulate(pipeline_parallel_degree, passes, num_steps):
    smp = start(pipeline_parallel_degree=pipeline_parallel_degree, ddp=True)
    raw = raw_model()
    model = smp.DistributedModel(raw, backward_passes_per_step=passes)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    step = smp.step(train_step)
    first: dict[str, torch.Tensor] = {}
    for update in range(2):
        optimizer.zero_grad()
        for number in range(num_steps):
            step(model, *data(10 * update + num_steps * smp.dp_rank() + number))
        if update == 0:
            first = gradients(model)
        optimizer.step()
    return first, host(model.local_named_parameters())


def plainly_accumulated(num_replicas, num_steps):
    """Sum over the steps of a replica, mean over replicas."""
    model, first = raw_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in range(2):
        optimizer.zero_grad()
        for number in range(num_replicas * num_steps):
            x, y = data(10 * update + number)
            (F.cross_entropy(model(x), y) / num_replicas).backward()
        if first is None:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return first, host(model.named_parameters())


@pytest.mark.parametrize(("degree", "passes"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_22_gradients_accumulate_over_steps(degree, passes):
    results = run_ranks(accumulate, 2, degree, passes, 2)
    expected, state = plainly_accumulated(2 // degree, 2)
    if degree == 2:
        close(merged(first for first, _ in results), expected)
        close(merged(last for _, last in results), state)
    else:
        for first, last in results:
            close(first, expected)
            close(last, state)
