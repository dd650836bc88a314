"""Clipping by the norm of all gradients; over stages and shards also in `test_parity_replicas`."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks

ORDERS = (2.0, 1.0, 3.0, math.inf)


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.enter = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 6)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))


def loss_of(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def batch():
    torch.manual_seed(6)
    return torch.randn(4, 6)


def clip(stages, is_sharded, source):
    functions = {
        "mpxla": smp.clip_grad_norm_,
        "torch": nn.utils.clip_grad.clip_grad_norm_,  # imported before torch_xla
        "torch_xla": clip_grad_norm_,  # torch_xla has put its own in the place of torch's
    }
    function = functions[source]
    assert function.__module__.startswith(source)
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": stages,
            "shard_optimizer_state": is_sharded,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    raw = Tied()
    model = smp.DistributedModel(raw)
    for layer in (raw.middle, raw.leave) if stages > 1 else ():
        smp.set_partition(layer, stages - 1)
    step, found = smp.step(loss_of), []
    for order in ORDERS:
        model.zero_grad()
        step(model, batch())
        norm = function(model.parameters(), 0.5, order)
        again = function(model.parameters(), 1e9, order)
        assert norm.device.type == "xla"
        found.append((norm.item(), again.item()))
    step(model, batch())
    part = function(raw.middle.parameters(), 1e9).item()
    return found, part, refused(model, step, function)


def refused(model, step, function):
    step(model, torch.full((4, 6), math.inf))
    try:
        function(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("stages", "replicas", "is_sharded", "source"),
    [
        (1, 1, False, "mpxla"),
        (2, 1, False, "torch"),
        (2, 1, False, "torch_xla"),
        (2, 2, True, "mpxla"),
        (2, 2, True, "torch"),
    ],
)
def test_the_norm_is_that_of_one_process(stages, replicas, is_sharded, source):
    """Torch's functions were imported by name, as scripts do, before there was a session."""
    results = run_ranks(clip, stages * replicas, stages, is_sharded, source)
    for found, part, text in results:
        for order, (norm, again) in zip(ORDERS, found, strict=True):
            model = Tied()
            model(batch()).square().sum().backward()
            expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
            assert norm == pytest.approx(expected.item(), rel=1e-5), order
            assert again == pytest.approx(0.5, rel=1e-5), order
        assert "the total norm of order 2.0 of the gradients is" in text
        assert results[0][1] == part > 0


def clip_too_early():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Tied())
    try:
        smp.clip_grad_norm_(model.parameters(), 1.0)
    except smp.MpxlaError as error:
        return str(error)


def test_clipping_before_the_first_step():
    for text in run_ranks(clip_too_early, 2):
        assert "clip_grad_norm_ needs gradients: call it after the first call of a step" in text


# --- torch's functions ---------------------------------------------------------------------------


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
    found["held"] = get_total_norm(held).item()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    smp.step(loss_of)(model, batch())
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "config"),
    [(2, {"pipeline_parallel_degree": 2}), (2, {"shard_optimizer_state": True})],
)
def test_torchs_functions_see_what_belongs_to_the_model(world_size, config):
    plain = Tied()
    plain(batch()).square().sum().backward()
    norm = clip_grad_norm_(plain.parameters(), 1e9).item()
    middle = plain.middle.weight.grad.norm().item()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for found, state in run_ranks(clip_in_other_ways, world_size, config):
        assert found["other"] == pytest.approx(math.sqrt(6.0))
        for key in ("local", "group"):
            assert found[key] == pytest.approx(norm, rel=1e-5), key
        assert found["one"] == pytest.approx(middle, rel=1e-5)
        assert found["none"] == 0.0
        assert "2 of the 7 parameters to clip are not the distributed model's" in found["mixed"]
        assert "norm_type is 0.0; use a positive order" in found["order"]
        if "shard_optimizer_state" in config:
            assert "gradients of parameters are on their owners only" in found["divided"]
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def count_what_it_costs(config):
    """Collectives, programs and values read back, of clipping and updating, after the first."""
    import torch_xla.debug.metrics as metrics

    from mpxla.session import current
    from mpxla.stage.compile import num_compilations

    def num_read():
        transfers = metrics.metric_data("TransferFromDeviceTime")
        scalars = metrics.counter_value("aten::_local_scalar_dense")
        return (transfers[0] if transfers else 0) + (scalars or 0)

    model, transport, calls = start(config), current().transport, []
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        if number:
            for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_many"):
                _count(transport, name, calls)
            before, read = num_compilations(), num_read()
        clip_grad_norm_(model.parameters(), 0.5)
        in_clipping = list(calls)
        optimizer.step()
    return in_clipping, num_compilations() - before, num_read() - read


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
        assert calls == [("all_gather", 1)]
        assert num_compiled == 0
        assert num_read == 0
