"""Training with several models, written once and run plainly and on ranks.

A scenario is given a *lab*, which wraps models, optimizers and step functions: `PlainLab` does what
one process of plain PyTorch does on the whole batch, `RankLab` what a rank of mpxla does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH = 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, z):
        return self.leave(torch.tanh(self.norm(self.enter(z))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x)))


class PlainLab:
    """Plain PyTorch, with the interface of mpxla."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def model(self, kind: Callable[[], nn.Module], seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = kind()
        module.backward = lambda loss: loss.backward(retain_graph=True)  # type: ignore[assignment]
        return module

    def optimizer(self, inner: torch.optim.Optimizer) -> Any:
        return inner

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(*args).detach()

    def data(self, width: int, seed: int) -> torch.Tensor:
        return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(seed))

    def mean(self, value: torch.Tensor) -> float:
        return value.item()

    def clip(self, models: list[Any], max_norm: float) -> float:
        # Each once, though models share some.
        parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def note_gradients(self, key: str, model: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters()}
        self.seen[key] = {n: g if g is None else g.clone() for n, g in found.items()}

    def note_state(self, key: str, model: Any, optimizer: Any = None) -> None:
        self.seen[key] = {n: v.clone() for n, v in model.state_dict().items()}
        if optimizer is not None:
            states = optimizer.state_dict()["state"]
            self.seen[f"{key} optimizer"] = {
                f"{position}.{name}": torch.as_tensor(value).clone()
                for position, state in states.items()
                for name, value in state.items()
            }

    def note(self, key: str, value: Any) -> None:
        self.seen[key] = value


class RankLab(PlainLab):
    """One rank of mpxla; replicas divide the batch."""

    def __init__(self, **config: Any):
        import mpxla as smp

        super().__init__()
        self.smp = smp
        smp.init({"microbatches": 2, **config})

    def model(self, kind: Callable[[], nn.Module], seed: int) -> Any:
        torch.manual_seed(seed)
        return self.smp.DistributedModel(kind())

    def optimizer(self, inner: torch.optim.Optimizer) -> Any:
        return self.smp.DistributedOptimizer(inner)

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.smp.step(function)

    def data(self, width: int, seed: int) -> torch.Tensor:
        whole = super().data(width, seed)
        if self.smp.pp_rank() > 0:
            return torch.zeros(BATCH // self.smp.dp_size(), 0)
        return whole.chunk(self.smp.dp_size())[self.smp.dp_rank()]

    def mean(self, value: Any) -> float:
        own = value.reduce_mean().item()
        return sum(self.smp.allgather(own, self.smp.DP_GROUP)) / self.smp.dp_size()

    def note_gradients(self, key: str, model: Any) -> None:
        if self.smp.state.cfg.shard_optimizer_state:
            return  # they are in pieces on their owners
        found = dict(model.local_named_parameters()) if model.partitioned else {}
        self.seen[key] = {
            n: p.grad if p.grad is None else p.grad.cpu().clone() for n, p in found.items()
        }

    def note_state(self, key: str, model: Any, optimizer: Any = None) -> None:
        super().note_state(key, model, optimizer)


# --- scenarios ----------------------------------------------------------------------------------


def gan(lab: PlainLab) -> None:
    """Two optimizers, alternating steps; the generator's step gives the critic gradients too."""
    g, d = lab.model(Generator, 1), lab.model(Critic, 2)
    of_g = lab.optimizer(torch.optim.Adam(g.parameters(), lr=0.01))
    of_d = lab.optimizer(torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9))

    @lab.step
    def judge(g, d, z, x):
        loss = d(g(z).detach()).square().mean() + (d(x) - 1).square().mean()
        d.backward(loss)
        return loss

    @lab.step
    def forge(g, d, z):
        loss = (d(g(z)) - 1).square().mean()
        g.backward(loss)
        return loss

    losses = []
    for number in range(3):
        of_d.zero_grad()
        losses.append(lab.mean(judge(g, d, lab.data(4, number), lab.data(3, 50 + number))))
        lab.note_gradients(f"g after judge {number}", g)
        of_d.step()
        of_g.zero_grad()
        losses.append(lab.mean(forge(g, d, lab.data(4, 100 + number))))
        lab.note_gradients(f"g after forge {number}", g)
        lab.note_gradients(f"d after forge {number}", d)
        of_g.step()
    d.requires_grad_(False)
    of_g.zero_grad()
    losses.append(lab.mean(forge(g, d, lab.data(4, 7))))
    lab.note_gradients("d frozen", d)
    of_g.step()
    lab.note("losses", losses)
    lab.note_state("g", g, of_g)
    lab.note_state("d", d, of_d)


def distillation(lab: PlainLab) -> None:
    """The teacher is frozen and evaluates; it is placed by a step of its own."""
    teacher, student = lab.model(Generator, 1), lab.model(Generator, 2)
    teacher.eval()
    teacher.requires_grad_(False)
    optimizer = lab.optimizer(torch.optim.Adam(student.parameters(), lr=0.01))

    @lab.step
    def evaluate(model, x):
        return model(x).square().mean()

    @lab.step
    def imitate(student, x):
        with torch.no_grad():
            target = teacher(x)
        loss = (student(x) - target).square().mean()
        student.backward(loss)
        return loss

    losses = [lab.mean(evaluate(teacher, lab.data(4, 5)))]
    for number in range(3):
        optimizer.zero_grad()
        losses.append(lab.mean(imitate(student, lab.data(4, number))))
        optimizer.step()
    losses.append(lab.mean(evaluate(student, lab.data(4, 5))))
    lab.note("losses", losses)
    lab.note_gradients("teacher gradients", teacher)
    lab.note_state("teacher", teacher)
    lab.note_state("student", student, optimizer)


def actor_and_critic(lab: PlainLab) -> None:
    """One loss over both, two optimizers, norms of each and of both; steps of one in between."""
    actor, critic = lab.model(Generator, 1), lab.model(Critic, 2)
    of_actor = lab.optimizer(torch.optim.Adam(actor.parameters(), lr=0.01))
    of_critic = lab.optimizer(torch.optim.Adam(critic.parameters(), lr=0.02))

    @lab.step
    def learn(x, y):
        value = critic(y)
        loss = (actor(x).mean(1, keepdim=True) * value.detach()).mean() + value.square().mean()
        actor.backward(loss)
        return loss

    @lab.step
    def rate(y):
        loss = (critic(y) - 1).square().mean()
        critic.backward(loss)
        return loss

    losses, norms = [], []
    for number in range(3):
        of_actor.zero_grad()
        of_critic.zero_grad()
        losses.append(lab.mean(learn(lab.data(4, number), lab.data(3, 50 + number))))
        losses.append(lab.mean(rate(lab.data(3, 70 + number))))  # adds to the critic's alone
        norms.append(lab.clip([critic], 0.05))
        lab.note_gradients(f"actor {number}", actor)
        lab.note_gradients(f"critic {number}", critic)
        norms.append(lab.clip([actor, critic], 0.01))
        of_actor.step()
        of_critic.step()
    lab.note("losses", losses)
    lab.note("norms", norms)
    lab.note_state("actor", actor, of_actor)
    lab.note_state("critic", critic, of_critic)


def one_optimizer(lab: PlainLab) -> None:
    """Models are first used alone, so data flows back between stages when they are joined."""
    g, d = lab.model(Generator, 1), lab.model(Critic, 2)
    optimizer = lab.optimizer(torch.optim.Adam([*g.parameters(), *d.parameters()], lr=0.01))

    @lab.step
    def shape(z):
        loss = g(z).square().mean()
        g.backward(loss)
        return loss

    @lab.step
    def rate(x):
        loss = (d(x) - 1).square().mean()
        d.backward(loss)
        return loss

    @lab.step
    def both(z, x):
        g.backward((d(g(z)) - 1).square().mean())
        loss = d(x).square().mean()
        d.backward(loss)
        return loss

    losses = []
    for number in range(2):
        optimizer.zero_grad()
        losses.append(lab.mean(shape(lab.data(4, number))))
        optimizer.step()
    for number in range(2):
        optimizer.zero_grad()
        losses.append(lab.mean(rate(lab.data(3, number))))
        losses.append(lab.mean(both(lab.data(4, 20 + number), lab.data(3, 30 + number))))
        lab.note_gradients(f"g {number}", g)
        optimizer.step()
    lab.note("losses", losses)
    lab.note_state("g", g, optimizer)
    lab.note_state("d", d)


class Shared(nn.Module):
    """A head on an encoder, which is given."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


def shared_encoder(lab: PlainLab) -> None:
    """Two models have an encoder in common, which the optimizer of the critic trains."""
    torch.manual_seed(4)
    encoder = Generator()
    actor = lab.model(lambda: Shared(encoder), 1)
    critic = lab.model(lambda: Shared(encoder), 2)
    heads = [p for name, p in actor.named_parameters() if "head" in name]
    of_actor = lab.optimizer(torch.optim.Adam(heads, lr=0.01))
    of_critic = lab.optimizer(torch.optim.Adam(critic.parameters(), lr=0.02))

    @lab.step
    def rate(x):
        loss = (critic(x) - 1).square().mean()
        critic.backward(loss)
        return loss

    @lab.step
    def learn(x):
        loss = (actor(x) * critic(x)).mean() + critic(x).square().mean()
        critic.backward(loss)
        return loss

    losses, norms = [], []
    for number in range(4):
        of_actor.zero_grad()
        of_critic.zero_grad()
        losses.append(lab.mean((rate if number < 2 else learn)(lab.data(4, number))))
        lab.note_gradients(f"critic {number}", critic)
        norms.append(lab.clip([critic], 0.5) if number < 2 else lab.clip([actor, critic], 0.5))
        of_critic.step()
        if number > 1:
            of_actor.step()
    lab.note("losses", losses)
    lab.note("norms", norms)
    lab.note_state("actor", actor, of_actor)
    lab.note_state("critic", critic, of_critic)


def alternating(lab: PlainLab) -> None:
    """Both losses of a GAN in one step, which changes `requires_grad` in between."""
    g, d = lab.model(Generator, 1), lab.model(Critic, 2)
    enter = getattr(g, "module", g).enter
    of_g = lab.optimizer(torch.optim.AdamW(g.parameters(), 0.01, weight_decay=0.1))
    of_d = lab.optimizer(torch.optim.SGD(d.parameters(), 0.1, momentum=0.9, weight_decay=0.1))

    @lab.step
    def forge_first(z, x):
        fake = g(z)
        for parameter in d.parameters():
            parameter.requires_grad = False
        forged = (d(fake) - 1).square().mean()
        g.backward(forged)
        for parameter in d.parameters():
            parameter.requires_grad = True
        judged = d(fake.detach()).square().mean() + (d(x) - 1).square().mean()
        d.backward(judged)
        return forged + judged

    @lab.step
    def judge_first(z, x):
        """Trains a part of the generator, and leaves the critic frozen."""
        enter.requires_grad_(False)
        fake = g(z)
        d.requires_grad_(True)
        judged = d(fake.detach()).square().mean() + (d(x) - 1).square().mean()
        d.backward(judged)
        d.requires_grad_(False)
        forged = (d(fake) - 1).square().mean()
        g.backward(forged)
        enter.requires_grad_(True)
        return forged + judged

    losses = []
    for number, step in enumerate([forge_first, forge_first, judge_first, judge_first]):
        of_g.zero_grad()
        of_d.zero_grad()
        losses.append(lab.mean(step(lab.data(4, number), lab.data(3, 50 + number))))
        both = (*g.parameters(), *d.parameters())
        lab.note(f"flags {number}", [int(p.requires_grad) for p in both])
        lab.note_gradients(f"g {number}", g)
        lab.note_gradients(f"d {number}", d)
        of_g.step()
        of_d.step()
    lab.note("losses", losses)
    lab.note_state("g", g, of_g)
    lab.note_state("d", d, of_d)


def averages(lab: PlainLab) -> None:
    """A teacher that averages its student, in the step, and a trail of both, evaluated after it."""
    student, teacher, trail = (lab.model(Generator, 1) for _ in range(3))
    teacher.requires_grad_(False)
    optimizer = lab.optimizer(torch.optim.Adam(student.parameters(), lr=0.01))

    @lab.step
    def train(student, teacher, z, x):
        with torch.no_grad():
            wanted = teacher(z)
        made = student(z)
        loss = (made - wanted).square().mean() + (made - x).square().mean()
        student.backward(loss)
        return loss

    @lab.step
    def evaluate(trail, z):
        return trail(z).square().mean()

    seen = []
    for number in range(3):
        optimizer.zero_grad()
        seen.append(lab.mean(train(student, teacher, lab.data(4, number), lab.data(3, 50))))
        optimizer.step()
        with torch.no_grad():
            for own, target, far in zip(
                student.parameters(), teacher.parameters(), trail.parameters(), strict=True
            ):
                target.data.copy_(0.1 * own.data + 0.9 * target.data)
                far.mul_(0.5).add_(own, alpha=0.25).add_(target, alpha=0.25)
        seen.append(lab.mean(evaluate(trail, lab.data(4, number))))
    lab.note("losses", seen)
    lab.note_state("student", student, optimizer)
    lab.note_state("teacher", teacher)
    lab.note_state("trail", trail)


def target_networks(lab: PlainLab) -> None:
    """Two critics and an actor with targets, all of which could be trained, in two step functions.

    The first one uses the actor's target, not the actor.
    """
    actor, actor_target = lab.model(Generator, 1), lab.model(Generator, 1)
    one, two, one_target, two_target = (lab.model(Critic, seed) for seed in (2, 3, 2, 3))
    of_critics = lab.optimizer(torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.01))
    of_actor = lab.optimizer(torch.optim.Adam(actor.parameters(), lr=0.01))

    @lab.step
    def judge(z, x):
        with torch.no_grad():
            action = actor_target(z)
            wanted = 1 + 0.9 * torch.min(one_target(action), two_target(action))
        loss = (one(x) - wanted).square().mean() + (two(x) - wanted).square().mean()
        one.backward(loss)
        return loss

    @lab.step
    def act(z):
        loss = -one(actor(z)).mean()
        actor.backward(loss)
        return loss

    losses = []
    for number in range(3):
        of_critics.zero_grad()
        losses.append(lab.mean(judge(lab.data(4, number), lab.data(3, 50 + number))))
        of_critics.step()
        of_actor.zero_grad()
        losses.append(lab.mean(act(lab.data(4, number))))
        of_actor.step()
        for target, own in ((actor_target, actor), (one_target, one), (two_target, two)):
            for old, new in zip(target.parameters(), own.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
    lab.note("losses", losses)
    for key, model in (("actor", actor_target), ("one", one_target), ("two", two_target)):
        lab.note_state(key, model)


_LATER = averages, target_networks, actor_and_critic, one_optimizer, shared_encoder
SCENARIOS = {function.__name__: function for function in (gan, alternating, distillation, *_LATER)}


def run_plainly(name: str) -> dict[str, Any]:
    """What a scenario shows in plain PyTorch."""
    lab = PlainLab()
    SCENARIOS[name](lab)
    return lab.seen


def run_on_rank(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What a scenario shows on one rank."""
    lab = RankLab(**config)
    SCENARIOS[name](lab)
    return lab.seen
