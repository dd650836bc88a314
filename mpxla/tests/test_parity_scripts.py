"""What training scripts do with models, two steps each on two ranks, against plain PyTorch.

The models of `test_parity` are about shapes of graphs; these are about habits: frozen layers, two
losses, a teacher without gradients, tensors changed in place, layers that keep state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mpxla as smp
from mpxla.graph.capture.torch_parts import flexible_attention_by_scores, torchs_recurrences
from mpxla.tests.parity import Plain
from mpxla.tests.parity_checks import merge
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import GRADIENT, LOSS, PARAMETER, ROUNDING, assert_close_by_norm

pytestmark = pytest.mark.ranks

MICROBATCHES = 2
SAMPLES = 4


@dataclass(frozen=True)
class Script:
    """One habit.

    Attributes:
        build: makes the model.
        step: body of the step function, `step(model, x, y)`; returns the loss.
        shape: of one sample.
        before: called as `before(model, number)` before every step.
    """

    build: Callable[[], nn.Module]
    step: Callable[..., torch.Tensor]
    shape: tuple[int, ...] = (5,)
    before: Callable[[Any, int], Any] = lambda model, number: None


def data(script: Script, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SAMPLES, *script.shape, generator=generator)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def gradients_of(named: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu().clone() for name, p in named if p.grad is not None}


def train(name: str) -> tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    script = SCRIPTS[name]
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    torch.manual_seed(0)
    model = smp.DistributedModel(script.build())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, losses, gradients = smp.step(script.step), [], []
    for number in range(2):
        script.before(model, number)
        optimizer.zero_grad()
        losses.append(step(model, *data(script, number)).reduce_mean().item())
        gradients.append(gradients_of(model.local_named_parameters()))
        optimizer.step()
    state = {n: v.cpu() for n, v in model.local_state_dict().items() if torch.is_tensor(v)}
    return losses, gradients, state


def train_plainly(script: Script) -> tuple[list[float], list[dict[str, torch.Tensor]], Any]:
    torch.manual_seed(0)
    model = Plain(script.build(), MICROBATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for number in range(2):
        script.before(model, number)
        optimizer.zero_grad()
        parts = zip(*(t.chunk(MICROBATCHES) for t in data(script, number)), strict=True)
        found = [script.step(model, *(t.clone() for t in part)).item() for part in parts]
        losses.append(sum(found) / MICROBATCHES)
        gradients.append(gradients_of(model.module.named_parameters()))
        optimizer.step()
    return losses, gradients, model.module.state_dict()


def classify(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


# --- models -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: str = "LSTM"):
        super().__init__()
        self.body = getattr(nn, kind)(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        outputs, last = self.body(x)
        hidden = last[0] if isinstance(last, tuple) else last  # [layers, B, H]
        return self.head(outputs[:, 0] + hidden.transpose(0, 1).flatten(1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        checkpoint = torch.utils.checkpoint.checkpoint
        x = checkpoint(self.body, self.enter(x), use_reentrant=True)
        return self.leave(checkpoint(self.body, x, use_reentrant=False))


class Assigning(nn.Module):
    """Keeps an average in a buffer, by assignment, and a count, in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        x = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0).detach()
        self.count += 1
        return self.head(x - self.mean)


class Writing(nn.Module):
    """Writes into parts of tensors."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = 2 * self.body(x)
        x[:, 0] = 2 * x[:, 1]
        x[x > 0.5] = 0.3
        made = torch.zeros(x.shape[0], 8)
        made[:, :4] = x[:, 4:]
        made[:, 4:] += x[:, :4]
        return self.head(made)


def with_normalized_weights():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.spectral_norm(model[2])  # writes to a buffer that it does not read
    nn.utils.parametrizations.spectral_norm(model[4])
    return model


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body((x.abs() * 3).long().clamp(max=8)).mean(dim=1))


# --- steps --------------------------------------------------------------------------------------


def learn_from_a_teacher(model, x, y):
    with torch.no_grad():
        wanted = model(x).softmax(dim=-1)
    logits = model(x + 0.1)
    loss = F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(dim=-1), wanted)
    model.backward(loss)
    return loss


def compare_distributions(model, x, y):
    logits = model(x)
    wanted = F.one_hot(y, 3) * 0.7 + 0.1
    loss = F.kl_div(logits.log_softmax(dim=-1), wanted, reduction="batchmean")
    model.backward(loss)
    return loss


def activations():
    layers = [nn.ELU(), nn.Linear(8, 8), nn.SELU(), nn.Linear(8, 8), nn.CELU(), nn.Linear(8, 6)]
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.GLU())


def penalize_weights(model, x, y):
    penalty = sum(p.abs().sum() for n, p in model.named_parameters() if n.endswith("weight"))
    loss = F.cross_entropy(model(x), y) + 0.01 * penalty
    model.backward(loss)
    return loss


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.forge, self.judge = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1))


def compete(model, x, y):
    nets, score = model.module, F.binary_cross_entropy_with_logits
    real, forged = nets.judge(x + 1), nets.forge(x)
    caught, passed = nets.judge(forged.detach()), nets.judge(forged)
    loss = score(real, torch.ones_like(real)) + score(caught, torch.zeros_like(caught))
    model.backward(loss)
    model.backward(score(passed, torch.ones_like(passed)))
    return loss


def partly_compiled():
    model = mlp()
    model[2] = torch.compile(model[2], backend="eager")  # the default one takes long to import
    model[3].compile(backend="eager")
    return torch.compile(model, backend="eager")


def smoothed(logits, y):
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def sharpened(logits: torch.Tensor) -> torch.Tensor:
    return logits * math.sqrt(logits.size(-1))


def classify_compiled(model, x, y):
    logits = torch.jit.script(sharpened)(model(x))  # which reads what `math.sqrt` is
    loss = torch.compile(smoothed, backend="eager")(logits, y)
    model.backward(loss)
    return loss


class FlexibleAttention(nn.Module):
    """Scores with a trained bias; the mask is made of the inputs."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(4, 24), nn.Linear(8, 3)
        self.slopes = nn.Parameter(torch.tensor([0.5, -0.2]))

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.project(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        ends = (x[:, :, 0] > 0).sum(1) + 1

        def allowed(b, h, i, j):
            return (i >= j) & (j < ends[b])

        def biased(score, b, h, i, j):
            return score + self.slopes[h] * (i - j)

        mask = create_block_mask(allowed, batch, None, length, length, device="cpu")
        found = flex_attention(query, key, value, score_mod=biased, block_mask=mask)
        return self.head(found.transpose(1, 2).flatten(2).mean(1))


def thaw_first_layer(model, number):
    model.module[0].requires_grad_(number == 1)


def clamp_weights(model, number):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


SCRIPTS = {
    "recurrent": Script(Recurrent, classify, (2, 5)),
    "gated": Script(lambda: Recurrent("GRU"), classify, (2, 5)),
    "checkpointed": Script(Checkpointed, classify),
    "assigning": Script(Assigning, classify),
    "writing": Script(Writing, classify),
    "normalized": Script(with_normalized_weights, classify),
    "sparse": Script(Sparse, classify),
    "activations": Script(activations, classify),
    "divergence": Script(mlp, compare_distributions),
    "teacher": Script(mlp, learn_from_a_teacher),
    "penalty": Script(mlp, penalize_weights),
    "adversaries": Script(Adversaries, compete),
    "compiled": Script(partly_compiled, classify_compiled),
    "flexible": Script(FlexibleAttention, classify, (5, 4)),
    "thawing": Script(mlp, classify, before=thaw_first_layer),
    "clamping": Script(mlp, classify, before=clamp_weights),
}


QUICK = ("recurrent", "checkpointed", "assigning", "sparse", "divergence", "compiled", "clamping")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in SCRIPTS]
)
def test_trains_as_plain_torch(name):
    with (
        torchs_recurrences(),  # where an earlier test has imported torch_xla
        torch.compiler.set_stance("force_eager"),
        flexible_attention_by_scores(),  # else it is compiled for the processor, in a minute
    ):
        losses, gradients, state = train_plainly(SCRIPTS[name])
    results = run_ranks(train, 2, name)
    for found, _, _ in results:
        assert found == pytest.approx(losses, rel=LOSS)
    for number, expected in enumerate(gradients):
        found = merge([found[number] for _, found, _ in results])
        dense = {n: g.to_dense() for n, g in expected.items()}
        assert_close_by_norm(found, dense, GRADIENT, floor=ROUNDING)
    held = merge([part for _, _, part in results])
    assert_close_by_norm(held, state, PARAMETER, floor=ROUNDING)


def evaluate_in_inference_mode_first():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    torch.manual_seed(0)
    model = smp.DistributedModel(mlp())
    x, y = data(SCRIPTS["penalty"], 0)
    with torch.inference_mode():
        logits = smp.step(lambda model, x: model(x))(model, x).concat().cpu().clone()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    smp.step(classify)(model, x, y)
    optimizer.step()
    return logits, model.state_dict()


def test_inference_mode_around_the_first_step():
    """What that step placed could not be trained: its parameters were inference tensors."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data(SCRIPTS["penalty"], 0)
    expected = model(x).detach()
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for logits, state in run_ranks(evaluate_in_inference_mode_first, 2):
        torch.testing.assert_close(logits, expected)
        assert_close_by_norm(state, model.state_dict(), PARAMETER, floor=ROUNDING)


# --- random numbers -----------------------------------------------------------------------------

DRAWS = {
    "permutation": lambda h: h[:, torch.randperm(8)] * torch.arange(8.0),
    "noise": torch.randn_like,
    "normal distribution": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
    "categories": lambda h: (
        torch.distributions.Categorical(logits=torch.zeros(h.shape[0], 99)).sample()[:, None] * h
    ),
    "gumbel": F.gumbel_softmax,
}


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.body(x)
        drawn = [draw(hidden) for draw in DRAWS.values()]
        return self.head(hidden + sum(drawn)), drawn


def draw_with_seeds():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    torch.manual_seed(0)
    model = smp.DistributedModel(Drawing())

    @smp.step
    def step(model, x):
        out, drawn = model(x)
        model.backward(out.square().mean())
        return drawn

    seen = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        seen.append([values.stack().cpu() for values in step(model, torch.ones(SAMPLES, 5))])
    return seen


def test_whatever_draws_replays_from_the_seed():
    for first, second, again in run_ranks(draw_with_seeds, 2):
        for name, a, b, c in zip(DRAWS, first, second, again, strict=True):
            assert torch.equal(a, c), name
            assert not torch.equal(a, b), name
            assert not torch.equal(a[0], a[1]), f"{name}: microbatches draw for themselves"
