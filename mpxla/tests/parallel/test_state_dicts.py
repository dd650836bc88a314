"""State dictionaries on their way to the host."""

from collections import OrderedDict, namedtuple
from unittest import mock

import pytest
import torch
from torch import nn

from mpxla.errors import CheckpointError
from mpxla.parallel.state_dicts import (
    HELD_KEY,
    ORDER_KEY,
    check_order,
    merge_optimizer_states,
    pick_optimizer_state,
)
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

Pair = namedtuple("Pair", "left right")


def on_the_device(backend, host):
    """A structure of tensors of the device, and one of the host."""
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor([True, False])]
    ready = backend.publish(backend.put(tensors))
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16).to(backend.device) * 3)
    scalar = torch.tensor(2.5).to(backend.device)
    return OrderedDict(
        first=ready[0],
        nested=Pair([ready[1], 7], {"scalar": scalar, "none": None}),
        parameter=parameter,
        again=ready[0],
        host=host,
        text="adam",
    )


def copy_to_host():
    from mpxla.parallel.state_dicts import to_host

    backend, host = backend_here(), torch.zeros(2)
    values = on_the_device(backend, host)
    with mock.patch.object(backend, "get", wraps=backend.get) as get:
        found = to_host(values, backend)
    copied = [len(call.args[0]) for call in get.call_args_list]
    host += 1
    values["first"].zero_()
    is_on_device = backend.is_on_device(host)
    return found, copied, is_on_device, found["parameter"].requires_grad


@pytest.mark.ranks
def test_all_tensors_come_to_the_host_at_once():
    ((found, copied, is_on_device, needs_grad),) = run_ranks(copy_to_host, 1)
    assert copied == [4 + is_on_device], "each tensor once"
    assert isinstance(found, OrderedDict)
    names = ["first", "nested", "parameter", "again", "host", "text"]
    assert list(found) == names
    assert isinstance(found["nested"], Pair)
    torch.testing.assert_close(found["first"], torch.arange(6.0).view(2, 3), rtol=0, atol=0)
    assert found["again"].equal(found["first"])
    assert found["nested"].left[0].tolist() == [True, False]
    assert found["nested"].left[1] == 7
    assert found["nested"].right["scalar"].equal(torch.tensor(2.5))
    assert found["nested"].right["none"] is None
    assert found["parameter"].equal(torch.full((3,), 3.0, dtype=torch.bfloat16))
    assert type(found["parameter"]) is torch.Tensor and not needs_grad
    if is_on_device:
        assert found["host"].tolist() == [0.0, 0.0], "a state to load again stays as it was"
    else:
        assert found["host"].tolist() == [1.0, 1.0], "host tensors share memory, as in torch"
    assert found["text"] == "adam"


def count_transfers():
    import torch_xla.debug.metrics as met

    from mpxla.parallel.state_dicts import to_host

    values = on_the_device(backend_here(), torch.zeros(2))
    met.clear_all()
    to_host(values, backend_here())
    return met.metric_data("TransferFromDeviceTime")[0]


@pytest.mark.ranks
@pytest.mark.torch_xla
def test_torch_xla_moves_them_in_one_transfer():
    assert run_ranks(count_transfers, 1) == [1]


@pytest.mark.ranks
def test_a_structure_without_tensors_is_left_alone():
    assert run_ranks(copy_nothing, 1) == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def copy_nothing():
    from mpxla.parallel.state_dicts import to_host

    return to_host({"lr": 0.1, "betas": (0.9, 0.99)}, backend_here())


@pytest.mark.unit
def test_partial_optimizer_states_have_to_be_those_of_all_ranks():
    groups = [{"lr": 0.1, "params": [0, 1, 2]}]
    first = {"state": {0: {"step": 1}}, "param_groups": groups, HELD_KEY: [0, 1]}
    second = {"state": {2: {"step": 1}}, "param_groups": groups, HELD_KEY: [2]}
    merged = merge_optimizer_states([second, first])
    assert merged["state"] == {0: {"step": 1}, 2: {"step": 1}}, "nothing ever trained parameter 1"
    with pytest.raises(CheckpointError, match=r"none is of 1 parameters .* \(positions \[2\]"):
        merge_optimizer_states([first, first])


@pytest.mark.unit
def test_positions_that_two_ranks_count_differently_are_noticed():
    parts = [{ORDER_KEY: ["a", "b", None]}, {ORDER_KEY: ["a", None, "c"]}, {}]
    check_order(parts)
    with pytest.raises(CheckpointError, match="number 1 is b for one and c for the other"):
        check_order([*parts, {ORDER_KEY: ["a", "c", "b"]}])


def state_dicts_of_shuffled_parameters(config):
    """What says the state dict of an optimizer whose parameters have another order on rank 1.

    The two ranks' parameters have the same shapes, and each rank's are at positions that the other
    has no state for.
    """
    import mpxla as smp

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)]))
    parameters = list(model.parameters())
    if smp.rank() == 1:
        parameters[2:] = reversed(parameters[2:])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(parameters))

    @smp.step
    def train(model, x):
        model.backward(model(x).square().mean())

    train(model, torch.ones(4, 3))
    optimizer.step()
    try:
        optimizer.state_dict()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline_parallel_degree": 2},
        {"ddp": True, "shard_optimizer_state": True},
    ],
)
def test_an_order_of_each_rank_makes_no_state_dict(config):
    lines = run_ranks(state_dicts_of_shuffled_parameters, 2, config)
    assert all("number 2 is 2.weight for one and 3.weight for the other" in line for line in lines)


@pytest.mark.unit
def test_names_of_parameters_go_with_them():
    groups = [{"params": [0, 1], "param_names": ["a", "b"]}, {"params": [2], "param_names": ["c"]}]
    picked = pick_optimizer_state({"state": {1: {"x": 1}}, "param_groups": groups}, [[1], []])
    assert [g["param_names"] for g in picked["param_groups"]] == [["b"], []]
    assert picked["state"] == {0: {"x": 1}}


def write_to_state_dicts():
    """Warnings of a step each, after what a script may do with a state dict."""
    import mpxla as smp

    lines = []
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def warned():
        with mock.patch("mpxla.parallel.state_dicts.warn_once", lambda _, line: lines.append(line)):
            train(model, torch.ones(4, 3))
        return [lines.pop() for _ in list(lines)]

    seen = [warned()]
    values = model.state_dict()
    averaged = {name: value * 2 for name, value in values.items()}
    seen.append(warned())
    values["0.weight"].mul_(2)
    model.load_state_dict(values)
    seen.append(warned())
    values = model.state_dict()
    values["0.weight"].mul_(2)
    seen += [warned(), warned()]
    with torch.inference_mode():
        model.state_dict()["0.weight"].mul_(2)  # whose writes are not counted
    seen.append(warned())
    model.state_dict()["0.weight"].mul_(2)  # and is gone
    return averaged.keys() == values.keys(), [*seen, warned()]


@pytest.mark.ranks
def test_values_of_a_state_dict_that_a_script_writes_to_and_does_not_load_are_warned_of():
    for is_same, (*before, once, after, uncounted, gone) in run_ranks(write_to_state_dicts, 2):
        assert is_same and before == [[], [], []] and after == uncounted == [] and gone == once
        assert len(once) == 1 and once[0].startswith("0.weight of model.state_dict() was written")
        assert "call model.load_state_dict" in once[0]
