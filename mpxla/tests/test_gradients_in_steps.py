"""Step functions that take gradients themselves have the numbers of plain PyTorch.

All cases run one step in the stages of one process; one trains on two ranks as well.
"""

import copy

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


class ByNeed(torch.autograd.Function):
    """Its derivative depends on whether the weight needs one, on purpose."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            return 3 * gradient @ weight, 3 * gradient.T @ x
        return 2 * gradient @ weight, None


class Net(nn.Module):
    def __init__(self, num_outputs=1):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 12), nn.Linear(12, num_outputs)
        self.block = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh())

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.leave(x + self.block(x))


class Smooth(Net):
    """Without a layer norm, whose third derivatives are wrong in PyTorch (2.9)."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh())


class WithOwn(Net):
    def forward(self, x):
        return Cubed.apply(super().forward(x), 0.5)


class Assigned(Net):
    """It writes to parts of tensors."""

    def forward(self, x):
        y = torch.zeros(4, 2)
        y[:, :1] = super().forward(x)
        y[:, 1].copy_(x.sin().sum(1))
        return y


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


def without_gradients(model, x):
    with torch.no_grad():
        slopes = torch.func.grad(lambda v: model(v).square().sum())(x)
        _, pushed = torch.func.jvp(model, (x,), (x,))
    return model(x + slopes).square().mean() + (pushed * model(x)).mean()


def broadcast(model, x):
    """What is broadcast stays a view."""
    hidden = model(x) * 1
    view = hidden.view_as(hidden)
    torch.broadcast_tensors(x[:, :1], view)
    hidden.cumsum_(0)
    return view.square().mean()


def whole_jacobian(model, x):
    return jacobian(lambda v: model(v).sum(0), x, create_graph=True).square().mean()


def of_torch_func(model, x):
    """Where it takes other roads in torch: several arguments, results, orders and columns."""

    def both(v, factor):
        return model(v) * factor, {"sum": v.sum() * factor}

    factor = x[0, 0].detach()
    slopes, value = torch.func.grad_and_value(lambda v: model(v).square().sum())(x)
    _, pull, kept = torch.func.vjp(lambda v: (both(v, factor), v.mean()), x, has_aux=True)
    (pulled,) = pull((torch.ones(4, 1), {"sum": factor}))
    _, (pushed, named) = torch.func.jvp(both, (x, factor), (x * 0.5, factor))
    columns = torch.func.jacrev(lambda v: both(v[None], factor), chunk_size=3)(x[0])
    curved = torch.func.hessian(lambda v: model(v[None]).sum())(x[0])
    parameters = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).square().mean()

    fast = torch.func.grad(loss)(parameters)
    sums = (slopes, pulled, pushed, named["sum"], columns[0], columns[1]["sum"], curved)
    total = sum(found.square().mean() for found in sums) + value * 0.1 + kept
    return total + loss({name: p - 0.1 * fast[name] for name, p in parameters.items()})


def of_samples(model, x):
    """Gradients of every sample, clipped by their norms, and second derivatives at every point."""
    parameters = dict(model.named_parameters())

    def loss(given, row, scale):
        result = torch.func.functional_call(model, given, (row[None],))
        return (result * scale).square().mean(), {"row": row * scale}

    of_each = torch.vmap(torch.func.grad(loss, has_aux=True), in_dims=(None, 0, None))
    gradients, aux = of_each(parameters, x, 0.5)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
    clipped = [torch.einsum("b,b...->...", 1 / (1 + norms), g) for g in gradients.values()]

    def curvature(point, factor=1.0):
        return torch.func.hessian(lambda v: model(v[None]).sum())(point).diagonal() * factor

    curved = torch.vmap(curvature, in_dims=1, out_dims=1, chunk_size=3)(x.T, factor=2.0)
    both = torch.vmap(torch.vmap(torch.func.grad(lambda v: v.exp() * v)), out_dims=(-1,))(x)
    total = sum(found.square().sum() for found in clipped) + aux["row"].sum() * 0.1
    return total + (curved * torch.arange(4.0)[:, None]).square().mean() + (both * x).mean()


def in_rows(model, x):
    x.requires_grad_()
    rows = torch.eye(4).unsqueeze(-1)
    (found,) = torch.autograd.grad(model(x), x, rows, is_grads_batched=True, create_graph=True)
    return found.square().sum()


def frozen_in_between(model, x):
    weight = model.block[0].weight
    hidden = model.enter(x)
    weight.requires_grad_(False)
    loss = ByNeed.apply(hidden, weight).square().mean()
    weight.requires_grad_(True)
    return loss + ByNeed.apply(hidden * 2, weight).mean()


CASES = {
    "torch_func": (Smooth, of_torch_func),
    "samples": (Smooth, of_samples),
    "rows": (Net, in_rows),
    "penalized": (Net, penalized),
    "slopes": (Net, slopes_alone),
    "second": (Net, second_derivative),
    "attacked": (Net, attacked),
    "adapted": (Net, adapted),
    "leaf": (Net, leaf_from_here),
    "enabled": (Net, enabled_inside),
    "without": (Net, without_gradients),
    "broadcast": (Net, broadcast),
    "jacobian": (lambda: Net(2), whole_jacobian),
    "own": (WithOwn, penalized),
    "assigned": (Assigned, penalized),
    "frozen": (Net, frozen_in_between),
    "attention": (Attending, penalized),
    "recurrent": (Recurrent, penalized),
    "convolution": (Convolving, penalized),
}
QUICK = ("adapted", "own", "assigned", "without", "broadcast")


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


def evaluated():
    """Slopes by an evaluation step without gradients around, and the plain ones."""
    import mpxla as smp

    smp.init({"microbatches": 1})
    torch.manual_seed(5)
    raw, x = Net(), torch.randn(4, 4)

    def attack(model, x):
        with torch.enable_grad():
            moved = x.clone().requires_grad_()
            target = model(x).detach()
            (slopes,) = torch.autograd.grad((model(moved) * (1 + target)).sum(), moved)
        return slopes, torch.func.grad(lambda v: model(v).square().sum())(x)

    def guided(model, x):
        with torch.no_grad():
            moved = x.clone().requires_grad_()
            with torch.enable_grad():
                (slopes,) = torch.autograd.grad(model(moved).square().sum(), moved)
        return slopes, model(x + slopes).detach()

    wanted = guided(raw, x)
    with torch.no_grad():
        wanted += attack(raw, x)
        model = smp.DistributedModel(raw)
        attacked = smp.step(attack)(model, x)
    found = *smp.step(guided)(model, x), *attacked
    return wanted, [value.reduce_mean() for value in found]


@pytest.mark.ranks
def test_evaluation_steps_without_gradients_around_take_some():
    ((wanted, found),) = run_ranks(evaluated, 1)
    torch.testing.assert_close(list(wanted), found)


@pytest.mark.ranks
def test_training_on_two_ranks():
    ranks = run_ranks(trained, 2, "penalized", timeout_s=300)
    losses, parameters = trained_plainly("penalized")
    assert ranks[0][0] == pytest.approx(losses, rel=1e-4)
    held = merged([part for _, part in ranks])
    torch.testing.assert_close(held, parameters, rtol=1e-4, atol=1e-6)


def saliency(model, x, backward):
    """What a tensor in the middle has as a gradient, after a backward and after another one."""
    hidden = torch.tanh(model.enter(x))
    middle = hidden + model.block(hidden)
    hidden.retain_grad()
    middle.retain_grad()
    scores = model.leave(middle)
    assert middle.grad is None
    backward(scores.square().mean())
    first = hidden.grad * hidden
    backward(scores.sin().sum())
    return first, hidden.grad, middle.grad


def retained():
    """Gradients that tensors keep in a step, and those of the weights; then the plain ones."""
    import mpxla as smp

    smp.init({"microbatches": 1})
    torch.manual_seed(5)
    raw, x = Net().double(), torch.randn(4, 4, dtype=torch.float64)
    plain = copy.deepcopy(raw)
    wanted = saliency(plain, x, lambda loss: loss.backward(retain_graph=True))
    wanted = [*(value.detach() for value in wanted), *(p.grad for p in plain.parameters())]
    model = smp.DistributedModel(raw)
    step = smp.step(lambda model, x: saliency(model.module, x, model.backward))
    found = [value.reduce_mean() for value in step(model, x)]
    return wanted, [*found, *(p.grad.cpu() for p in model.local_parameters())]


@pytest.mark.ranks
def test_tensors_keep_their_gradient_when_asked_to():
    ((wanted, found),) = run_ranks(retained, 1, timeout_s=200)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def watched():
    """Parameters held in a list, in steps under torch's detection of anomalies; plain ones."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    torch.manual_seed(5)
    raw, batches = Net().double(), [torch.randn(n, 4, dtype=torch.float64) for n in (4, 3, 4)]
    raw.penalized = [(list(raw.parameters()), 0.1)]
    plain = copy.deepcopy(raw)

    def loss_of(net, x):
        score = net(x).square().mean()
        (slope,) = torch.autograd.grad(score, net.penalized[0][0][0], create_graph=True)
        penalty = sum(f * p.square().sum() for held, f in net.penalized for p in held)
        return score + penalty + slope.square().mean()

    @smp.step
    def train_step(model, x):
        loss = loss_of(model.module, x)
        model.backward(loss)
        return loss

    model = smp.DistributedModel(raw)
    own = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with torch.autograd.detect_anomaly():
        for x in batches:
            own.zero_grad()
            train_step(model, x)
            own.step()
            optimizer.zero_grad()
            loss_of(plain, x).backward()
            optimizer.step()
        is_on_again = torch.is_anomaly_enabled()
    return {n: p.detach().cpu() for n, p in model.local_named_parameters()}, (
        {n: p.detach() for n, p in plain.named_parameters()},
        is_on_again,
    )


@pytest.mark.ranks
def test_held_parameters_train_while_torch_looks_for_anomalies():
    ranks = run_ranks(watched, 2, timeout_s=200)
    wanted, is_on_again = ranks[0][1]
    assert is_on_again
    torch.testing.assert_close(merged([p for p, _ in ranks]), wanted, rtol=1e-9, atol=1e-12)


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

    def mapped(model, x):
        slopes = torch.func.grad(lambda v: model(v).sum())
        return torch.vmap(slopes, randomness="same")(x)

    def forward_mode(model, x):
        return torch.func.linearize(model, x)[1](x)

    def detached(model, x):
        return torch.autograd.grad(model(x).detach().sum(), x)[0]

    def plain_backward(model, x):
        model(x).sum().backward()

    found = []
    for function in (mapped, forward_mode, detached, plain_backward):
        with pytest.raises(Exception) as error:
            smp.step(function)(model, torch.ones(4, 4))
        found.append(str(error.value))
    return found


@pytest.mark.ranks
def test_other_derivatives_are_refused_with_what_to_write_instead():
    ((mapped, forward_mode, detached, plain_backward),) = run_ranks(refused, 1)
    assert "torch.stack([grad(f)(row) for row in x])" in mapped
    assert "Use torch.func.jvp" in forward_mode
    for text in (mapped, forward_mode):
        assert "test_gradients_in_steps.py" in text
    assert "does not require grad" in detached
    assert "Call model.backward(loss)" in plain_backward
    assert "torch.autograd.grad(loss, x)" in plain_backward
