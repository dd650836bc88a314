"""What scripts do with several models besides training: placement, hooks, checkpoints, errors."""

import logging
import re

import pytest
import torch

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.several import Critic, Generator, RankLab

pytestmark = pytest.mark.ranks

STAGES = {"pipeline_parallel_degree": 2}
MANUAL = {**STAGES, "auto_partition": False, "default_partition": 0}


@smp.step
def forge(g, d, z):
    loss = (d(g(z)) - 1).square().mean()
    g.backward(loss)
    return loss


@smp.step
def draw(g, z):
    loss = g(z).square().mean()
    g.backward(loss)
    return loss


def message_of(use):
    try:
        use()
    except smp.MpxlaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Placement, hooks and errors.


def use_one_after_the_other(folder):
    smp.init({"microbatches": 2, **MANUAL})
    with smp.partition(1):
        raw_g = Generator()
    raw_d = Critic()
    g, d = smp.DistributedModel(raw_g), smp.DistributedModel(raw_d)
    of_d = smp.DistributedOptimizer(torch.optim.SGD(d.parameters(), lr=0.1))
    events = []
    for name, model in (("g", g), ("d", d)):
        model.register_post_partition_hook(
            lambda m, o, n=name: events.append((n, "placed", o is of_d, d.partitioned))
        )
        model.register_post_step_hook(lambda m, o, n=name: events.append((n, "step", o is of_d)))
    draw(g, torch.randn(4, 4))
    early = [
        message_of(d.partition_report),
        message_of(d.local_parameters),
        message_of(lambda: smp.clip_grad_norm_(d.parameters(), 1.0)),
        message_of(lambda: smp.save_checkpoint(folder, "t", model=d)),
        message_of(lambda: smp.set_partition(raw_g.leave, 0)),
        message_of(lambda: smp.resume_from_checkpoint(folder)),
        message_of(
            lambda: smp.DistributedOptimizer(torch.optim.SGD(Critic().parameters(), lr=0.1))
        ),
    ]
    smp.set_partition(raw_d.leave, 1)
    forge(g, d, torch.randn(4, 4))
    held = [sorted(model.local_state_dict()) for model in (g, d)]
    return events, early, held, g.partition_report(), d.partition_report()


def test_each_model_is_placed_by_the_first_step_that_uses_it(tmp_path):
    for rank, result in enumerate(run_ranks(use_one_after_the_other, 2, str(tmp_path))):
        events, early, (of_g, of_d), report_g, report_d = result
        assert events == [
            ("g", "placed", False, False),
            ("g", "step", False),
            ("d", "placed", True, True),
            ("g", "step", False),
            ("d", "step", True),
        ]
        layers = ("enter", "leave", "norm")
        named = [f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight")]
        assert of_g == ["_smp_is_partial", *(named if rank == 1 else [])]
        part = ("enter", "leave")[rank]
        assert of_d == ["_smp_is_partial", f"{part}.bias", f"{part}.weight"]
        assert "model_2" not in report_g
        assert "model_1, model_2.enter" not in report_g
        assert "model_1" in report_d and "model_2.leave" in report_d, report_d
        for text, pattern in zip(early, EARLY, strict=True):
            assert re.search(pattern, text), text


EARLY = (
    r"MpxlaError: the model is partitioned by the first call of a step function that uses it",
    r"MpxlaError: model\.local_parameters is known after the first call",
    r"MpxlaError: smp\.clip_grad_norm_ needs gradients: .* that uses the model",
    r"CheckpointError: .*the model is not partitioned yet; .* after the first step that uses it",
    r"MpxlaError: smp\.set_partition was called after the model was partitioned",
    r"MpxlaError: smp\.resume_from_checkpoint was called without model=, and this script has 2 ",
    r"MpxlaError: the SGD given to .* holds parameters of none of the 2 distributed models",
)


def use_names_that_look_alike():
    """The first model has a module called as the label of the second would be."""
    smp.init({"microbatches": 2, **STAGES})
    first = smp.DistributedModel(torch.nn.ModuleDict({"model_2": Critic()}))
    second = smp.DistributedModel(Critic())

    @smp.step
    def train(x):
        loss = (first.module["model_2"](x) + 2 * second(x)).mean()
        second.backward(loss)
        return loss

    train(torch.ones(4, 3))
    names = "model_2.leave.bias", "leave.bias"
    found = [
        dict(m.local_named_parameters()).get(n) for m, n in zip((first, second), names, strict=True)
    ]
    return [p if p is None else p.grad.item() for p in found]


def test_names_of_models_do_not_meet():
    results = run_ranks(use_names_that_look_alike, 2)
    for position, wanted in enumerate((1.0, 2.0)):
        assert wanted in [result[position] for result in results]


def make_a_model_later(config, is_delayed):
    """Returns what is held, gradients, and the lines of the log about compiling."""
    smp.init({"microbatches": 2, "delayed_parameter_initialization": is_delayed, **config})
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mpxla").addHandler(handler)
    torch.manual_seed(1)
    raw_g, raw_d = Generator(), Critic()
    g = smp.DistributedModel(raw_g)
    z = torch.ones(4, 4)
    draw(g, z)
    g.zero_grad()
    d = smp.DistributedModel(raw_d)
    draw(g, z)
    rate = smp.step(lambda d, x: [d.backward(loss := d(x).square().mean()), loss][1])
    rate(d, torch.ones(4, 3))
    for model in (g, d):
        model.zero_grad()
    forge(g, d, z)
    logging.getLogger("mpxla").removeHandler(handler)
    held = [sorted(n for n, _ in model.local_named_parameters()) for model in (g, d)]
    named = [dict(model.local_named_parameters()) for model in (g, d)]
    gradients = [{n: p.grad.cpu() for n, p in found.items()} for found in named]
    reasons = [line for line in lines if line.startswith("compiled step function draw")]
    return held, gradients, reasons, d.partition_report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_delayed", "is_loaded"),
    [
        (False, False),
        (False, True),
        (True, False),
    ],
)
def test_a_model_may_be_made_after_steps_with_another(tmp_path, is_delayed, is_loaded):
    """The partition file is that of the first step; it is followed when both are there again."""
    config = {**STAGES, "partition_file": str(tmp_path / "partition.json")}
    results = run_ranks(make_a_model_later, 2, config, is_delayed)
    torch.manual_seed(1)
    g, d = Generator(), Critic()
    (d(g(torch.ones(4, 4))) - 1).square().mean().backward()
    for (of_g, of_d), gradients, reasons, report in results:
        assert len(of_g) + len(of_d) > 0
        assert "another model was made since" in reasons[1], reasons
        sizes = re.findall(r"(\d+) \(\d+ B\)", report)
        assert sum(map(int, sizes)) == 4, "the parameters of this model alone"
        for module, found in zip((g, d), gradients, strict=True):
            for name, value in found.items():
                expected = module.get_parameter(name).grad
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    if is_loaded:
        again = run_ranks(make_a_model_later, 2, {**config, "load_partition": True}, False)
        assert [result[0] for result in again] == [result[0] for result in results]


# Checkpoints.


def models_and_optimizers(lab, is_joint):
    g, d = lab.model(Generator, 1), lab.model(Critic, 2)
    if is_joint:
        both = [*g.parameters(), *d.parameters()]
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(both, lr=0.01))
        return (g, optimizer), (d, None)
    return tuple(
        (m, smp.DistributedOptimizer(torch.optim.Adam(m.parameters(), lr=0.01))) for m in (g, d)
    )


def train(lab, pairs, numbers):
    (g, _), (d, _) = pairs
    losses = []
    for number in numbers:
        optimizers = [optimizer for _, optimizer in pairs if optimizer is not None]
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(lab.mean(forge(g, d, lab.data(4, number))))
        for optimizer in optimizers:
            optimizer.step()
    return losses


def save_both(folder, config, is_joint):
    """Trains, saves under one path each, and trains on."""
    lab = RankLab(**config)
    pairs = models_and_optimizers(lab, is_joint)
    train(lab, pairs, range(2))
    for name, (model, optimizer) in zip("gd", pairs, strict=True):
        smp.save_checkpoint(f"{folder}/{name}", "two", model=model, optimizer=optimizer)
    losses = train(lab, pairs, range(2, 4))
    return losses, [model.state_dict() for model, _ in pairs]


def resume_both(folder, config, is_joint):
    lab = RankLab(**config)
    pairs = models_and_optimizers(lab, is_joint)
    for name, (model, optimizer) in zip("gd", pairs, strict=True):
        smp.resume_from_checkpoint(
            f"{folder}/{name}", model=model, load_optimizer=optimizer is not None
        )
    losses = train(lab, pairs, range(2, 4))
    return losses, [model.state_dict() for model, _ in pairs]


SHARDED = {"ddp": True, "shard_optimizer_state": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed", "is_joint"),
    [
        ((2, STAGES), (2, STAGES), False),
        ((2, STAGES), (1, {}), True),
        ((2, SHARDED), (2, STAGES), False),
        ((2, SHARDED), (2, SHARDED), True),
    ],
)
def test_checkpoints_of_both_models_resume(tmp_path, saved, resumed, is_joint):
    before = run_ranks(save_both, saved[0], str(tmp_path), saved[1], is_joint)
    after = run_ranks(resume_both, resumed[0], str(tmp_path), resumed[1], is_joint)
    (losses, states), (found_losses, found_states) = before[0], after[0]
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for state, found in zip(states, found_states, strict=True):
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
