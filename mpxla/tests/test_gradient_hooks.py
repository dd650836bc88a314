"""Hooks on gradients of tensors, parameters and modules: the same training as in PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STEPS, MICROBATCHES = 3, 2


def forward(model, x):
    return model.last(torch.tanh(model.middle(torch.tanh(model.first(x)))))


def clamped(model, x):
    """All readers count, those before the hook as well, and hooks are called in their order."""
    y = torch.tanh(model.first(x))
    z = model.middle(y)
    y.register_hook(lambda g: g.clamp(-0.002, 0.002))
    y.register_hook(lambda g: 3 * g)
    return model.last(torch.tanh(z) + y)


def by_own_sign(model, x):
    """The hook computes with what is read of its tensor."""
    y = model.first(x)
    positive = (y > 0).float()
    z = model.middle(torch.tanh(y))
    y.register_hook(lambda g: g * positive)
    return model.last(torch.tanh(z) + y)


def in_checkpoint(model, x):
    def part(y):
        z = torch.tanh(model.middle(y))
        if z.requires_grad:
            z.register_hook(lambda g: g.clamp(-0.003, 0.003))
        return torch.sin(z)

    return model.last(checkpoint(part, model.first(x), use_reentrant=False))


def of_derivative(model, x):
    """`torch.autograd.grad` gives what the hook returns."""
    with torch.enable_grad():
        y = torch.tanh(model.first(x))
        y = y if y.requires_grad else y.requires_grad_()
        y.register_hook(lambda g: 2 * g)
        out = model.last(torch.tanh(model.middle(y)))
        (g,) = torch.autograd.grad(out.sum(), y, create_graph=True)
    return out + g.mean(1, keepdim=True)


def only_where_needed(model, x):
    """As code does that is also run without gradients; one of the hooks only looks."""
    y = torch.tanh(model.first(x))
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g)
        y.register_hook(lambda g: None)
    return model.last(torch.tanh(model.middle(y)))


def of_equilibrium(model, x):
    """The hook solves for the gradient with the derivative of what forward has computed."""
    y = torch.tanh(model.first(x))
    found = y.clone().detach().requires_grad_()
    turn = 0.5 * torch.tanh(model.middle(found))

    def solve(gradient):
        sums = torch.zeros(2, *gradient.shape)
        for _ in range(3):
            (change,) = torch.autograd.grad(turn, found, gradient + sums[0], retain_graph=True)
            sums[0] = change
        return gradient + sums[0]

    if y.requires_grad:
        y.register_hook(solve)
    return model.last(torch.tanh(model.middle(y)))


def masked(model):
    """As rows of an embedding are frozen; the hook reads a tensor outside of the model."""
    mask = torch.zeros(6, 6)
    mask[:3] = 1
    model.middle.weight.register_hook(lambda g: g * mask)


def several(model):
    def scale(gradient):
        gradient.mul_(0.3)

    model.middle.weight.register_hook(lambda g: g + 1e-3)
    model.middle.weight.register_hook(scale)
    model.last.bias.register_hook(lambda g: g.sign() * 0.01)


def tied(model):
    """The hook sees the sum of the gradients of both uses, which may be on two stages."""
    model.last.weight = model.first.weight
    model.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


def guided(model):
    model.middle.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0].clamp(min=0),))


def both(model):
    """The second hook is given what the first, which comes before the module's backward, gives."""
    model.middle.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 0.5,))
    model.middle.register_full_backward_hook(lambda m, gi, go: (gi[0] + go[0].sum(0),))
    model.middle.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.7,))


def of_first(model):
    """No argument has a gradient."""
    model.first.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 0.5,))
    model.first.register_full_backward_hook(lambda m, inputs, outputs: None)


IN_STEPS = [clamped, by_own_sign, of_equilibrium, in_checkpoint, of_derivative, only_where_needed]
OF_MODELS = [masked, several, tied, guided, both, of_first]
ALL = [*IN_STEPS, *OF_MODELS]
QUICK = [of_equilibrium, both]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.forward_of = kind if kind in IN_STEPS else forward
        if kind in OF_MODELS:
            kind(self)

    def forward(self, x):
        return self.forward_of(self, x)


def batch_of(number):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def expected(kind, replicas):
    """Losses and parameters of one process, where each replica has a part of each batch."""
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in batch_of(number).chunk(replicas * MICROBATCHES):
            loss = loss_of(model, part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= replicas
        optimizer.step()
    return losses, model.state_dict()


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


def train(kinds, config):
    smp.init({"microbatches": MICROBATCHES, "sdp_gradient_clipping": 1e6, **config})
    return [train_one(kind) for kind in kinds]


def train_one(kind):
    model = smp.DistributedModel(Model(kind))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(number).chunk(smp.rdp_size())[smp.rdp_rank()]
        losses.append([loss.item() for loss in train_step(model, x).outputs])
        optimizer.step()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def compare(kinds, world_size, config, replicas=1):
    found = run_ranks(train, world_size, kinds, config)
    for kind, results in zip(kinds, zip(*found, strict=True), strict=True):
        check(kind.__name__, expected(kind, replicas), results, world_size // replicas)


def check(name, wanted, results, num_stages):
    def close(one, other):
        torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")

    losses = torch.tensor([one for one, _ in results[::num_stages]])
    close(losses.transpose(0, 1).flatten(), torch.tensor(wanted[0]))  # step by step
    for _, state in results:
        close(state, wanted[1])


def test_hooks_on_two_stages():
    compare(QUICK, 2, {"pipeline_parallel_degree": 2})


SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("kinds", "config", "replicas"),
    [
        (ALL[1::2], {"pipeline_parallel_degree": 2}, 1),
        (ALL[::2], {"ddp": True}, 2),
        (ALL[2::3], SHARDED, 2),
        pytest.param(ALL, {"pipeline_parallel_degree": 2}, 1, marks=pytest.mark.long),
    ],
)
def test_hooks_elsewhere(kinds, config, replicas):
    compare(kinds, 2, config, replicas)


def look_and_change(num_stages):
    """What hooks have seen, by step; hooks are added and removed between steps."""
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": num_stages})
    raw = Model(forward)
    norms, checked = {}, []

    def check_finite(gradient):
        checked.append(bool(torch.isfinite(gradient).all()))

    for name, parameter in raw.named_parameters():
        parameter.register_hook(lambda g, name=name: norms.setdefault(name, []).append(g.norm()))
        parameter.register_hook(check_finite)
    model = smp.DistributedModel(raw)
    gradients = []
    for scale in (None, 0.5, 0.25, None):
        weight = model.module.middle.weight
        handle = weight.register_hook(lambda g, s=scale: g * s) if scale else None
        model.zero_grad()
        norms.clear()
        train_step(model, batch_of(0))
        found = {n: p.grad for n, p in model.local_named_parameters()}
        seen = {name: float(norms[name][-1]) for name in found}
        assert seen == pytest.approx({name: g.norm().item() for name, g in found.items()})
        gradients.append(found["middle.weight"].cpu().clone() if "middle.weight" in found else None)
        if handle is not None:
            handle.remove()
    assert checked and all(checked)
    return gradients


def check_looks(found):
    plain, half, quarter, again = next(g for g in found if g[0] is not None)
    torch.testing.assert_close(half, plain / 2)
    torch.testing.assert_close(quarter, plain / 4)
    assert torch.equal(again, plain)


@pytest.mark.slow
def test_hooks_that_look_and_hooks_that_come_and_go():
    check_looks(run_ranks(look_and_change, 1, 1))


@pytest.mark.slow
def test_hooks_that_look_on_two_stages():
    check_looks(run_ranks(look_and_change, 2, 2))


def with_updates(model):
    """An update in the backward, as it is done to keep no gradients."""
    optimizers = {p: torch.optim.Adam([p], lr=0.02) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    return handles[-1]


def update_in_backward(config):
    """The parameters after three steps, the last without a hook of the last bias."""
    smp.init({"microbatches": MICROBATCHES, **config})
    raw = Model(forward)
    last = with_updates(raw)
    model = smp.DistributedModel(raw)
    for number in range(STEPS):
        if number == STEPS - 1:
            last.remove()
        train_step(model, batch_of(number).chunk(smp.rdp_size())[smp.rdp_rank()])
        smp.step(loss_of)(model, batch_of(number))  # calls none
    left = {name for name, p in model.local_named_parameters() if p.grad is not None}
    return left, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [
        {"pipeline_parallel_degree": 2},
        pytest.param({"ddp": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_in_hooks_after_accumulation(config):
    """They come once per step call, with the mean over microbatches and replicas."""
    model = Model(forward)
    last = with_updates(model)
    for number in range(STEPS):
        if number == STEPS - 1:
            last.remove()
        loss_of(model, batch_of(number)).backward()
    results = run_ranks(update_in_backward, 2, config)
    for _, state in results:
        torch.testing.assert_close(state, model.state_dict())
    assert "last.bias" in set.union(*(left for left, _ in results)) <= {"last.bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"ddp": True, "shard_optimizer_state": True}, {}, "its gradient is on a master or"),
        ({"ddp": True}, {"backward_passes_per_step": 2}, "with backward_passes_per_step > 1 its"),
        ({"fp16": True}, {}, "its gradient is on a master or"),
    ],
)
def test_hooks_after_accumulation_where_no_gradient_is_whole(config, options, text):
    text = f"parameter first.weight has a hook by register_post_accumulate_grad_hook, and {text}"
    for error in run_ranks(refused, 1 if "fp16" in config else 2, config, options):
        assert text in error


def refused(config, options):
    smp.init({"microbatches": MICROBATCHES, **config})
    raw = Model(forward)
    with_updates(raw)
    model = smp.DistributedModel(raw, **options)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    with pytest.raises(smp.MpxlaError) as error:  # of this rank, or its peer's
        train_step(model, batch_of(0))
    return str(error.value)
