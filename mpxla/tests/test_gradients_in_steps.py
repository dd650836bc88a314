"""Step functions that take gradients themselves have the numbers of plain PyTorch.

All cases run one step in the stages of one process; one trains on two ranks as well.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import jacobian
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpxla.tests.clients import merged
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 3


class Cubed(torch.autograd.Function):
    """Its derivative is wrong on purpose."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 6 * gradient * x**2 * ctx.factor, None


class Net(nn.Module):
    def __init__(self, num_outputs=1):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 12), nn.Linear(12, num_outputs)
        self.block = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh())

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.leave(x + self.block(x))


class WithOwn(Net):
    def forward(self, x):
        return Cubed.apply(super().forward(x), 0.5)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        keys = {"dropout": 0.0, "batch_first": True, "activation": "gelu"}
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, **keys)

    def forward(self, x):
        states = self.layer(x.unsqueeze(1) * torch.arange(1, 4).view(1, 3, 1))
        return (states * torch.arange(12).view(3, 4)).mean((1, 2))


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = F.leaky_relu(self.norm(self.enter(x.unsqueeze(1))))
        return self.leave(F.max_pool1d(hidden, 2).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 8, batch_first=True)
        self.norm, self.leave = nn.GroupNorm(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        states, _ = self.layer(x.unsqueeze(1) * torch.arange(1, 4).view(1, 3, 1))
        return self.leave(self.norm(states.mean(1)))


def penalized(model, x):
    """The penalty of WGAN-GP (arXiv:1704.00028)."""
    x = x.detach().clone().requires_grad_(True)
    scores = model(x)
    (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + 10 * (slopes.norm(2, 1) - 1).square().mean()


def slopes_alone(model, x):
    x.requires_grad_()
    outputs = model(x)
    unused = torch.ones(3, requires_grad=True)
    slopes, nothing = torch.autograd.grad(
        outputs, (x, unused), torch.ones_like(outputs), create_graph=True, allow_unused=True
    )
    assert nothing is None
    return slopes.square().mean()


def second_derivative(model, x):
    """The residual of a differential equation."""
    x.requires_grad_(True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + u[:, 0] - x[:, 1]).square().mean()


def attacked(model, x):
    """Samples moved by the sign of their gradients, which are constants then."""
    near = x.clone().requires_grad_(True)
    loss = model(near).square().mean()
    (slopes,) = torch.autograd.grad(loss, near, retain_graph=True)
    return model(x + 0.1 * slopes.sign()).square().mean() + loss


def adapted(model, x):
    """One step of an inner optimizer, as in MAML (arXiv:1703.03400)."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, parameters, found, strict=True)}
    return torch.func.functional_call(model, fast, (x + 1,)).square().mean()


def leaf_from_here(model, x):
    """What was computed before `requires_grad_()` does not count."""
    before = model(x)
    x.requires_grad_()
    (slopes,) = torch.autograd.grad((model(2 * x) * before).sum(), x, create_graph=True)
    return slopes.square().mean()


def enabled_inside(model, x):
    with torch.no_grad():
        wanted = model(x)
        with torch.enable_grad():
            moved = torch.full_like(x, 0.1).requires_grad_()
            distance = (model(x + moved) - wanted).square().sum()
        (slopes,) = torch.autograd.grad(distance, moved)
    return model(x + F.normalize(slopes)).square().mean()


def whole_jacobian(model, x):
    return jacobian(lambda v: model(v).sum(0), x, create_graph=True).square().mean()


CASES = {
    "penalized": (Net, penalized),
    "slopes": (Net, slopes_alone),
    "second": (Net, second_derivative),
    "attacked": (Net, attacked),
    "adapted": (Net, adapted),
    "leaf": (Net, leaf_from_here),
    "enabled": (Net, enabled_inside),
    "jacobian": (lambda: Net(2), whole_jacobian),
    "own": (WithOwn, penalized),
    "attention": (Attending, penalized),
    "recurrent": (Recurrent, penalized),
    "convolution": (Convolving, penalized),
}
QUICK = ("leaf", "adapted", "own")


def built(name):
    torch.manual_seed(5)
    build, loss = CASES[name]

    def loss_of(model, batch):
        # In PyTorch, other forms of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            return loss(model, batch["x"].clone())

    return build(), loss_of, {"x": torch.randn(4, 4)}


def compared(names):
    """For every case what differs between one step in two stages and a plain one."""
    from mpxla.tests.stages_by_hand import differences, run_in_stages, run_plainly

    found = {}
    for name in names:
        model, loss_of, batch = built(name)
        plain = run_plainly(model, loss_of, batch)
        found[name] = differences(plain, run_in_stages(model, loss_of, batch))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(set(CASES) - set(QUICK)), marks=pytest.mark.slow)]
)
def test_one_step_in_two_stages(names):
    (found,) = run_ranks(compared, 1, names, timeout_s=300)
    assert found == dict.fromkeys(names, "")


def trained(name):
    """Losses and final parameters of several steps on this rank."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    raw, loss_of, batch = built(name)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=1e-2))

    @smp.step
    def step(model, x):
        loss = loss_of(model, {"x": x})
        model.backward(loss)
        return loss

    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch["x"]).reduce_mean().item())
        optimizer.step()
    return losses, {n: p.detach().cpu() for n, p in model.local_named_parameters()}


def trained_plainly(name):
    model, loss_of, batch = built(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, {"x": part}) for part in batch["x"].chunk(2)) / 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.ranks
def test_training_on_two_ranks():
    ranks = run_ranks(trained, 2, "penalized", timeout_s=300)
    losses, parameters = trained_plainly("penalized")
    assert ranks[0][0] == pytest.approx(losses, rel=1e-4)
    held = merged([part for _, part in ranks])
    torch.testing.assert_close(held, parameters, rtol=1e-4, atol=1e-6)


def masks():
    """How far gradients are from those of the masks that the results were made with."""
    import mpxla as smp

    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(4, 4))

    @smp.step
    def step(model, x):
        x.requires_grad_()
        results = F.dropout(model(x) * 0 + 3 * x, 0.5)
        (slopes,) = torch.autograd.grad(results.sum(), x)
        words = torch.ones(1, 4, 4)
        seen = F.scaled_dot_product_attention(words, words, x.unsqueeze(0), dropout_p=0.5)
        (in_seen,) = torch.autograd.grad(seen.sum(), x)
        return slopes * x - results, (in_seen * x).sum() - seen.sum(), (results == 0).sum()

    return [value.reduce_mean().abs().max().item() for value in step(model, torch.ones(4, 4) + 1)]


@pytest.mark.ranks
def test_gradients_are_those_of_the_numbers_that_were_drawn():
    ((dropped, attended, zeros),) = run_ranks(masks, 1, timeout_s=200)
    assert dropped < 1e-5
    assert attended < 1e-5
    assert 0 < zeros < 16


def refused():
    """Errors of step functions that a captured step cannot follow."""
    import mpxla as smp

    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(4, 1))

    def batched(model, x):
        x.requires_grad_()
        eye = torch.eye(4).unsqueeze(-1)
        return torch.autograd.grad(model(x), x, eye, is_grads_batched=True)[0]

    def of_func(model, x):
        return torch.func.grad(lambda v: model(v).sum())(x)

    def forward_mode(model, x):
        return torch.func.jvp(model, (x,), (x,))[1]

    def detached(model, x):
        return torch.autograd.grad(model(x).detach().sum(), x)[0]

    def plain_backward(model, x):
        model(x).sum().backward()

    found = []
    for function in (batched, of_func, forward_mode, detached, plain_backward):
        with pytest.raises(Exception) as error:
            smp.step(function)(model, torch.ones(4, 4))
        found.append(str(error.value))
    return found


@pytest.mark.ranks
def test_other_derivatives_are_refused_with_what_to_write_instead():
    ((batched, of_func, forward_mode, detached, plain_backward),) = run_ranks(refused, 1)
    assert "is_grads_batched" in batched
    assert "in a loop" in batched
    for text in (of_func, forward_mode):
        assert "torch.autograd.grad(f(x).sum(), x, create_graph=True)" in text
        assert "test_gradients_in_steps.py" in text
    assert "does not require grad" in detached
    assert "Call model.backward(loss)" in plain_backward
