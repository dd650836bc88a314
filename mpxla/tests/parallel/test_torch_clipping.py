"""Torch's clipping functions on parameters of the model, and on others."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.testing import run_ranks
from mpxla.tests.parallel.test_norms import Tied, batch, loss_of

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
