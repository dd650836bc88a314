"""Torch's clipping functions on parameters of the model, and on others."""

import functools
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.tests.clients import logged
from mpxla.tests.parallel.gradients.test_norms import Tied, batch, loss_of
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def start(config):
    smp.init({"ddp": True, "auto_partition": False, "default_partition": 0, **config})
    raw = Tied()
    model = smp.DistributedModel(raw)
    if smp.pp_size() > 1:
        smp.set_partition(raw.middle, 1)
    smp.step(loss_of)(model, batch())
    return model


def clip_in_other_ways(config):
    """What is given is the model's or not, here or elsewhere; and no gradient of it is lost."""
    model, found = start(config), {}
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    found["other"] = clip_grad_norm_(other.parameters(), 1e9).item()
    found["local"] = clip_grad_norm_(model.local_parameters(), 1e9).item()
    found["group"] = clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9).item()
    found["one"] = clip_grad_norm_(model.module.middle.weight, 1e9).item()
    new = nn.Linear(2, 2)  # a head that replaces another one, say, before the next step
    found["new"] = clip_grad_norm_([*model.parameters(), *new.parameters()], 1e9).item()
    found["none"] = nn.utils.clip_grad_norm_([], 1.0).item()
    try:
        clip_grad_norm_([*other.parameters(), *model.parameters()], 1.0)
    except MpxlaError as error:
        found["mixed"] = str(error)
    try:
        smp.clip_grad_norm_(model.parameters(), 1.0, 0.0)
    except ValueError as error:
        found["order"] = str(error)
    try:
        clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(0.1))
    except MpxlaError as error:
        found["divided"] = str(error)
    held = [p.grad for p in model.parameters() if p.grad is not None]
    with logged() as lines:
        found["held"] = get_total_norm(held).item()
        found["held, inf"] = get_total_norm(held, float("inf")).item()
        found["weights"] = get_total_norm(model.local_parameters()).item()
        found["others"] = get_total_norm([p.grad for p in other.parameters()]).item()
        found["all"] = list(lines)
        get_total_norm(held[:1])
        found["one only"] = list(lines)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    smp.step(loss_of)(model, batch())
    return found, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "config"),
    [(2, {"pipeline_parallel_degree": 2}), (2, {"shard_optimizer_state": True})],
)
def test_torchs_functions_see_what_belongs_to_the_model(world_size, config):
    plain = Tied()
    plain(batch()).square().sum().backward()
    norm = clip_grad_norm_(plain.parameters(), 1e9).item()
    middle = plain.middle.weight.grad.norm().item()
    largest = get_total_norm([p.grad for p in plain.parameters()], float("inf")).item()
    weights = get_total_norm(plain.parameters()).item()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for found, state in run_ranks(clip_in_other_ways, world_size, config):
        assert found["other"] == pytest.approx(math.sqrt(6.0))
        for key in ("local", "group", "new"):
            assert found[key] == pytest.approx(norm, rel=1e-5), key
        assert found["one"] == pytest.approx(middle, rel=1e-5)
        assert found["none"] == 0.0
        assert found["others"] == pytest.approx(math.sqrt(6.0))
        (warning,) = found["one only"]
        assert re.search(r"was given \d tensors at \S*test_torch_clipping\.py:\d+: .*", warning)
        if "shard_optimizer_state" in config:
            assert "holds in the place of parameters. The result is the norm of" in warning
        else:
            assert found["all"] == [], "all that a rank holds"
            assert found["held"] == pytest.approx(norm, rel=1e-5)
            assert found["held, inf"] == pytest.approx(largest, rel=1e-5)
            assert found["weights"] == pytest.approx(weights, rel=1e-5)
            assert "they are not all that this rank holds" in warning
        assert "2 of the 7 parameters to clip are not the distributed model's" in found["mixed"]
        assert "norm_type is 0.0; use a positive order" in found["order"]
        if "shard_optimizer_state" in config:
            assert "where gradients are on what the optimizer holds" in found["divided"]
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def norms_of_two():
    """Of the gradients of two models, each on its own, and of both together."""
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    first, second = Tied(), nn.Linear(6, 2)
    smp.set_partition(first.middle, 1)
    models = smp.DistributedModel(first), smp.DistributedModel(second)
    unused = smp.DistributedModel(nn.Linear(3, 3))  # until a later step

    @smp.step
    def step(first, second, x):
        loss = second(first(x)).square().sum()
        first.backward(loss)

    step(*models, batch())
    given = [[p.grad for p in model.parameters() if p.grad is not None] for model in models]
    with logged() as lines:
        found = [get_total_norm(grads).item() for grads in (*given, [*given[0], *given[1]])]
        every = [parameter for model in (*models, unused) for parameter in model.parameters()]
        found.append(clip_grad_norm_(every, 1e9).item())
    return found, [len(grads) for grads in given], lines


def test_norms_of_several_models():
    first, second = Tied(), nn.Linear(6, 2)
    second(first(batch())).square().sum().backward()
    given = [[p.grad for p in model.parameters()] for model in (first, second)]
    expected = [get_total_norm(grads).item() for grads in (*given, [*given[0], *given[1]])]
    results = run_ranks(norms_of_two, 2)
    assert [counts[1] for _, counts, _ in results] == [2, 0]
    for found, _, lines in results:
        assert found == pytest.approx([*expected, expected[-1]], rel=1e-5)
        assert lines == []


def count_what_it_costs(config):
    """Collectives, programs and values read back, of clipping and updating, after the first."""
    from mpxla.session import current

    model, calls = start(config), []
    transport, backend = current().transport, current().backend
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        if number:
            for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"):
                _count(transport, name, calls)
            before, read = backend.num_compilations, num_read(backend)
        clip_grad_norm_(model.parameters(), 0.5)
        in_clipping = list(calls)
        optimizer.step()
    return in_clipping, backend.num_compilations - before, num_read(backend) - read


def num_read(backend):
    """Lazy values that were read on the host so far; other backends have none."""
    if backend.name != "torch_xla":
        return 0
    import torch_xla.debug.metrics as metrics

    transfers = metrics.metric_data("TransferFromDeviceTime")
    scalars = metrics.counter_value("aten::_local_scalar_dense")
    return (transfers[0] if transfers else 0) + (scalars or 0)


def _count(transport, name, calls):
    original = getattr(transport, name)

    def count(tensor, *rest):
        calls.append((name, getattr(tensor, "numel", lambda: len(tensor))()))
        return original(tensor, *rest)

    setattr(transport, name, count)


@pytest.mark.parametrize(
    "config", [{"pipeline_parallel_degree": 2}, {"shard_optimizer_state": True}]
)
def test_clipping_costs_one_small_collective_and_no_reading_back(config):
    for calls, num_compiled, num_read in run_ranks(count_what_it_costs, 2, config):
        announced = [name for name, _ in calls[:-1]]  # by the first rank: that all clip now
        assert announced in ([], ["send"]) and calls[-1] == ("all_gather", 1)
        assert num_compiled == 0
        assert num_read == 0


class Lamb(torch.optim.Optimizer):
    """Scales the update of every parameter by its norm; its state is empty."""

    limit = None

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1.0
        if self.limit is not None:
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            scale = (self.limit / norm).clamp(max=1.0)
        for p in held:
            p.sub_(p.grad * scale * (0.1 * p.norm() / (p.grad.norm() + 1e-6)))


class ClippingLamb(Lamb):
    limit = 0.5


def train_by_norms():
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    raw = Tied()
    model = smp.DistributedModel(raw)
    smp.set_partition(raw.middle, 1)
    with logged() as lines:
        optimizer = smp.DistributedOptimizer(Lamb(model.parameters()))
        before = list(lines)
        smp.DistributedOptimizer(ClippingLamb(Tied().parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        smp.step(loss_of)(model, batch())
        optimizer.step()
    return before, lines, model.state_dict()


def test_norms_of_parameters_are_right_and_global_ones_are_told_of():
    plain = Tied()
    optimizer = Lamb(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        plain(batch()).square().sum().backward()
        optimizer.step()
    for before, lines, state in run_ranks(train_by_norms, 2):
        assert before == []
        text = "ClippingLamb is not compiled .*: it updates a parameter by the values of others too"
        assert re.search(text, lines[0])
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


class Alike(nn.Module):
    """Layers of one shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().sum()


def scale_by_hand(parameters):
    """As scripts do; nothing is read in between."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.grad.mul_(0.01 / norm)


def clip_with_norm(parameters):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    clip_grads_with_norm_(parameters, 0.01, norm)


CLIPPINGS = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 0.01),
    "with norm": clip_with_norm,
    "by hand": scale_by_hand,
}


def clip_alike(model, name, backward, wrap=lambda optimizer: optimizer):
    """Gradients that are read one by one, and what an optimizer makes that reads numbers."""
    parameters = list(model.parameters())
    optimizer = wrap(torch.optim.Adafactor(parameters, lr=0.1))
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        backward(torch.arange(24.0).view(4, 6) / 10)
        CLIPPINGS[name](parameters)
        if name != "by hand":
            gradients += [p.grad.detach().cpu().clone() for p in parameters]
        optimizer.step()
    return gradients, [p.detach().cpu() for p in parameters]


def clip_alike_distributed():
    smp.init({"pipeline_parallel_degree": 1})
    found = {}
    for name in CLIPPINGS:
        model = smp.DistributedModel(Alike())
        backward = functools.partial(smp.step(loss_of_alike), model)
        found[name] = clip_alike(model, name, backward, smp.DistributedOptimizer)
    return found


def loss_of_alike(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


@pytest.mark.slow
def test_gradients_of_one_shape_stay_apart():
    (found,) = run_ranks(clip_alike_distributed, 1)
    for name, (gradients, values) in found.items():
        plain = Alike()
        expected = clip_alike(plain, name, lambda x, plain=plain: plain(x).backward())
        for got, own in zip((*gradients, *values), (*expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(got, own, msg=name)
