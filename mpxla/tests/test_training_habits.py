"""What training scripts do beyond forward, backward and update has plain PyTorch's results.

Each habit is one function over a `Run`, which is either plain PyTorch on the union of the replicas'
batches or mpxla on one rank. All habits run one after the other in each kind of world.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4


class Net(nn.Module):
    """With a layer that is never used, and two that are used in turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.spare = nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x, turn="both"):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.left(x)) if turn != "right" else x
        x = torch.tanh(self.right(x)) if turn != "left" else x
        return self.last(x)


def loss_of(model, x, turn):
    return (model(x, turn) - 1).square().mean() * 3


@smp.step
def train_step(model, x, turn):
    loss = loss_of(model, x, turn)
    model.backward(loss)
    return loss


def held_back(model, x, importance, anchors):
    """The loss, and how far weights are from earlier ones, by how much those counted."""
    loss = loss_of(model, x, "both")
    for name, parameter in model.named_parameters():
        loss = loss + 5 * (importance[name] * (parameter - anchors[name]) ** 2).sum()
    return loss


class Run:
    """Plain PyTorch. Subclasses train otherwise."""

    seed = 0

    def __init__(self, replicas: int):
        self.raw = Net()
        self.model: Any = self.raw
        self._replicas = replicas

    def wrapped(self, optimizer):
        self._optimizer = optimizer
        return optimizer

    def batch(self, number):
        torch.manual_seed(number)
        return torch.randn(4 * self._replicas, 5)

    def step(self, number, turn="both"):
        loss = loss_of(self.model, self.batch(number), turn)
        loss.backward()
        return loss.item()

    def step_held_back(self, number, *kept):
        held_back(self.model, self.batch(number), *kept).backward()

    def loop(self, optimizer, numbers=range(STEPS), before=lambda: None):
        for number in numbers:
            optimizer.zero_grad()
            self.step(number)
            before()
            optimizer.step()

    def weights(self):
        return self.raw.state_dict()

    def result(self):
        """Weights and moments; plain names, as everything is gathered on all ranks."""
        found = {name: value.detach().clone() for name, value in self.weights().items()}
        for position, state in self._optimizer.state_dict()["state"].items():
            moments = {k: v for k, v in state.items() if torch.is_tensor(v) and v.dim() > 0}
            found |= {f"{key} {position}": value for key, value in moments.items()}
        return found


class RankRun(Run):
    """mpxla on one rank."""

    def __init__(self, config):
        smp.init({"ddp": True, "microbatches": 2, **config})
        super().__init__(smp.rdp_size())
        self.model = smp.DistributedModel(self.raw, bucket_cap_mb=400 / 2**20)

    def wrapped(self, optimizer):
        return super().wrapped(smp.DistributedOptimizer(optimizer))

    def step(self, number, turn="both"):
        part = self.batch(number).chunk(self._replicas)[smp.rdp_rank()]
        loss = train_step(self.model, part, turn).reduce_mean().item()
        return sum(smp.allgather(loss, smp.DP_GROUP)) / self._replicas

    def step_held_back(self, number, *kept):
        @smp.step
        def step(model, x):
            loss = held_back(model, x, *kept)
            model.backward(loss)
            return loss

        step(self.model, self.batch(number).chunk(self._replicas)[smp.rdp_rank()])

    def weights(self):
        return self.model.state_dict()


def in_phases(run, *changes):
    """Trains with one optimizer, and two steps more after each change (layer, is it trained)."""
    optimizer = run.wrapped(optim.AdamW(run.model.parameters(), 0.01, eps=1e-3))
    run.loop(optimizer, range(2))
    for number, (layer, is_trained) in enumerate(changes, 1):
        layer.requires_grad_(is_trained)
        run.loop(optimizer, range(2 * number, 2 * number + 2))


def freezing_later(run):
    in_phases(run, (run.raw.left, False), (run.raw.left, True))


def thawing_layer_by_layer(run):
    """The optimizer has all layers from the start, and gets one more each time."""
    for layer in (run.raw.first, run.raw.left):
        layer.requires_grad_(False)
    in_phases(run, (run.raw.left, True), (run.raw.first, True))


def thawing_into_new_groups(run):
    run.raw.first.requires_grad_(False)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    optimizer = run.wrapped(optim.AdamW(trained, 0.01, eps=1e-3))
    run.loop(optimizer, range(2))
    run.raw.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(run.raw.first.parameters()), "lr": 0.02})
    run.loop(optimizer, range(2, 4))


def part_of_the_parameters(run):
    run.loop(run.wrapped(optim.SGD([run.raw.left.weight, run.raw.last.bias], 0.1, 0.9)))


def groups_added_later(run):
    optimizer = run.wrapped(optim.AdamW(run.raw.last.parameters(), 0.01, eps=1e-3))
    run.loop(optimizer, range(2))
    optimizer.add_param_group({"params": list(run.raw.first.parameters()), "lr": 0.02})
    run.loop(optimizer, range(2, 4))


def groups_added_to_the_inner_optimizer(run):
    inner = optim.AdamW(run.raw.last.parameters(), 0.01, eps=1e-3)
    optimizer = run.wrapped(inner)
    run.loop(optimizer, range(2))
    inner.add_param_group({"params": list(run.raw.first.parameters()), "lr": 0.02})
    run.loop(optimizer, range(2, 4))


def accumulation_and_clipping(run):
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.1))
    for number in range(STEPS):
        run.step(number)
        if number % 2:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()


def clipping_by_value(run):
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.1))
    parameters = run.model.parameters
    run.loop(optimizer, before=lambda: nn.utils.clip_grad_value_(parameters(), 0.05))


def zeros_instead_of_none(run):
    """Momentum moves parameters whose gradients are zero; layers take turns."""
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.1, 0.9))
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        run.step(number, "left" if number % 2 else "right")
        optimizer.step()


def layers_in_turns(run):
    """Without gradients, parameters do not decay."""
    optimizer = run.wrapped(optim.AdamW(run.model.parameters(), 0.01, eps=1e-3, weight_decay=1.0))
    for number in range(STEPS):
        optimizer.zero_grad()
        run.step(number, "left" if number % 2 else "right")
        optimizer.step()


def cycling_momentum(run):
    inner = optim.SGD(run.model.parameters(), 0.1, 0.9)
    optimizer = run.wrapped(inner)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12)
    for number in range(12):
        optimizer.zero_grad()
        run.step(number)
        optimizer.step()
        schedule.step()


def reducing_on_plateaus(run):
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.3))
    schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = run.step(number)
        optimizer.step()
        schedule.step(loss)


def weights_changed_in_between(run):
    optimizer = run.wrapped(optim.Adam(run.model.parameters(), 0.02, eps=1e-3))
    for number in range(STEPS):
        run.loop(optimizer, [number])
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.clamp_(-0.2, 0.2)


def anchored_to_earlier_weights(run):
    """A second task, with elastic weight consolidation (Kirkpatrick et al., 2017)."""
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.1))
    run.loop(optimizer, range(2))
    importance = {n: torch.zeros_like(p) for n, p in run.model.named_parameters()}
    for number in range(2):
        optimizer.zero_grad()
        run.step(number)
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                importance[name] += parameter.grad.detach() ** 2
    anchors = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for number in range(2, 4):
        optimizer.zero_grad()
        run.step_held_back(number, importance, anchors)
        optimizer.step()


def norms_read_later(run):
    """Values that are computed when they are read, of tensors that have changed meanwhile."""
    optimizer = run.wrapped(optim.SGD(run.model.parameters(), 0.1))
    for number in range(STEPS):
        optimizer.zero_grad()
        run.step(number)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in everything if p.grad is not None]
        norms = [p.grad.norm() for p in trained]
        with torch.no_grad():
            for parameter in trained:
                parameter.grad.mul_(0.5)
        optimizer.step()
        for parameter, norm in zip(trained, norms, strict=True):
            torch.testing.assert_close(norm.item(), 2 * parameter.grad.norm().item())


def resetting_state(run):
    optimizer = run.wrapped(optim.Adam(run.model.parameters(), 0.02, eps=1e-3))
    run.loop(optimizer, range(2))
    optimizer.state.clear()
    run.loop(optimizer, range(2, 4))


def any_optimizer(run, kind, settings):
    run.loop(run.wrapped(kind(run.model.parameters(), **settings)))


class Lookahead(optim.Optimizer):
    """As found in many repositories: `Optimizer.__init__` is not called."""

    def __init__(self, params, steps=2, **settings):
        self.inner, self.steps = optim.SGD(params, **settings), steps
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"] if group["counter"] == 0 else ():
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))
            group["counter"] = (group["counter"] + 1) % self.steps

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        groups = self.inner.state_dict()["param_groups"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {
            "state": {i: self.state[p] for i, p in enumerate(parameters)},
            "param_groups": groups,
        }


class BareLookahead(Lookahead):
    """As found in others: it has no default settings either."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        del self.defaults


OPTIMIZERS = {
    "bare_lookahead": (BareLookahead, {"lr": 0.1, "momentum": 0.9}),
    "lookahead": (Lookahead, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
    "maximize": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "maximize": True}),
    "foreach": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    "fused": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    "asgd": (optim.ASGD, {"lr": 0.05}),
    "adadelta": (optim.Adadelta, {"lr": 0.5, "eps": 1e-3}),
    "adagrad": (optim.Adagrad, {"lr": 0.05, "eps": 1e-3, "initial_accumulator_value": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.02, "eps": 1e-3}),
    "nadam": (optim.NAdam, {"lr": 0.02, "eps": 1e-3}),
    "radam": (optim.RAdam, {"lr": 0.02, "eps": 1e-3}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "eps": 1e-2, "centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
}
HABITS = {
    habit.__name__: habit
    for habit in (
        *(freezing_later, thawing_layer_by_layer, thawing_into_new_groups),
        *(part_of_the_parameters, groups_added_later),
        *(groups_added_to_the_inner_optimizer, accumulation_and_clipping, clipping_by_value),
        *(zeros_instead_of_none, layers_in_turns, cycling_momentum, reducing_on_plateaus),
        *(weights_changed_in_between, norms_read_later, resetting_state),
        anchored_to_earlier_weights,
    )
} | {
    name: partial(any_optimizer, kind=kind, settings=settings)
    for name, (kind, settings) in OPTIMIZERS.items()
}


def train_in_all_ways(config, names, habits=HABITS, prepare=None):
    """Results of habits by name, each in a session of its own that `prepare(run)` may see first."""
    found = {}
    for name in names:
        run = RankRun(config)
        if prepare is not None:
            prepare(run)
        habits[name](run)
        found[name] = run.result()
        smp.shutdown()
    return found


WORLDS = {
    "replicas": (2, {}),
    "zero": (2, {"shard_optimizer_state": True}),
    "stages": (2, {"pipeline_parallel_degree": 2}),
    "pairs": (4, {"pipeline_parallel_degree": 2}),
    "grid": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
}


def in_two_worlds(habits):
    """Worlds with names of habits, as parameters of slow tests: each habit in one of three.

    Long: each habit is with stages and with replicas, at once or in turn.
    """
    slow, names = pytest.mark.slow, list(habits)
    worlds = (("grid", 0), ("replicas", 1), ("stages", 1))
    return [
        *(pytest.param(w, names[n::3], marks=slow) for n, (w, _) in enumerate(worlds)),
        *(pytest.param(w, names[n::2], marks=[slow, pytest.mark.long]) for w, n in worlds),
    ]


DIVIDED = {"gradients": (2, {"shard_gradients": True})}
"""Worlds in which scripts cannot change gradients themselves."""
CASES = [
    ("zero", ["groups_added_to_the_inner_optimizer"]),
    *(
        pytest.param("zero", names, marks=pytest.mark.slow)
        for names in (
            ["zeros_instead_of_none", "clipping_by_value"],
            ["thawing_layer_by_layer", "thawing_into_new_groups"],
        )
    ),
    pytest.param("gradients", ["thawing_layer_by_layer"], marks=pytest.mark.slow),
    ("stages", ["norms_read_later", "accumulation_and_clipping", "bare_lookahead"]),
    ("stages", ["anchored_to_earlier_weights"]),
    *in_two_worlds(HABITS),
]


def check_against_plain(train, world, names, habits=HABITS):
    """Compares what `train(config, names)` gives on the ranks of a world with plain PyTorch."""
    size, config = {**WORLDS, **DIVIDED}[world]
    ranks = run_ranks(train, size, config, names, timeout_s=500)
    for name in names:
        plain = Run(size // config.get("pipeline_parallel_degree", 1))
        habits[name](plain)
        for key, value in plain.result().items():
            for found in ranks:
                assert torch.allclose(found[name][key], value, rtol=1e-4, atol=1e-5), (name, key)


@pytest.mark.parametrize(("world", "names"), CASES)
def test_habits(world, names):
    check_against_plain(train_in_all_ways, world, names)
