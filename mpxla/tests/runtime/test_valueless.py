"""Parameters without values do not get into tensors with values."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import get_ema_multi_avg_fn

import mpxla as smp
from mpxla.errors import PeerFailure, StepError
from mpxla.runtime.divided import DividedParameter
from mpxla.runtime.valueless import AbsentParameter
from mpxla.tests.clients import close, data, raw_model
from mpxla.tests.ranks.run import run_ranks


def absent(kind=AbsentParameter):
    return kind(torch.empty(3, device="meta"))


WRITES = {
    "add": lambda own, other: own.add_(other, alpha=0.1),
    "data": lambda own, other: own.data.add_(other.data),
    "computed": lambda own, other: own.lerp_((other * 2)[:], 0.5),
    "operator": lambda own, other: own.__iadd__(other.detach()),
    "out": lambda own, other: torch.add(other, other, out=own),
    "where": lambda own, other: own.masked_fill_(other > 0, 0.0),
    "each": lambda own, other: torch._foreach_add_([own, own], [torch.ones(3), other]),
    "average": lambda own, other: get_ema_multi_avg_fn(0.9)([own], [other], 1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", [AbsentParameter, DividedParameter])
def test_writes_from_what_has_no_values_are_refused(kind, write):
    own = torch.ones(3)
    with torch.no_grad(), pytest.raises(StepError, match=r"no values here at .*valueless.py:.*"):
        write(own, absent(kind))
    assert own.tolist() == [1, 1, 1]


READS = {
    "item": lambda other: other.sum().item(),
    "number": lambda other: float(other[0]),
    "branch": lambda other: bool(other.any()),
    "cpu": lambda other: other.data.cpu(),
    "to": lambda other: other.to("cpu", torch.float64),
    "list": lambda other: other.tolist(),
    "numpy": lambda other: other.detach().numpy(),
    "array": np.asarray,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("kind", [AbsentParameter, DividedParameter])
def test_values_that_are_not_here_are_not_given(kind, read):
    asked = r"asked for by \.(item|to|tolist|numpy)\(\) .* at .*valueless.py:.*: they are on an"
    with torch.no_grad(), pytest.raises(StepError, match=asked):
        read(absent(kind))


def test_what_sets_start_values_of_all_parameters_goes_on():
    parameter, own = absent(), torch.ones(3)
    with torch.no_grad():
        parameter.copy_(own)
        parameter.data.copy_(own)
        parameter.mul_(0.9).add_(own)
        nn.init.normal_(parameter)
        torch._foreach_add_([own, parameter], [torch.ones(3), own])
    assert own.tolist() == [2, 2, 2]
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert parameter.device.type == "meta" and list(parameter.shape) == [3]


def test_lists_act_tensor_by_tensor():
    parameter, own = absent(), torch.ones(3)
    with torch.no_grad():
        torch._foreach_mul_([parameter, own], 3.0)
        torch._foreach_addcmul_([own, parameter], [own, own], [own, parameter], [1.0, 2.0])
        norms = torch._foreach_norm([own, parameter])
    assert own.tolist() == [12, 12, 12] and torch.equal(norms[0], own.norm())
    assert norms[1].is_meta and norms[1].dim() == 0


def test_what_is_computed_of_both_has_no_values():
    own = torch.ones(3)
    for use in (lambda: torch.cat([own, absent()]), lambda: own * absent(), lambda: own - absent()):
        with torch.no_grad(), pytest.raises(StepError, match=r"by \.item\(\) .*valueless.py:.*"):
            use().sum().item()
    for save in (lambda: torch.save([absent().data], io.BytesIO()), lambda: pickle.dumps(absent())):
        with pytest.raises(
            StepError, match=r"by torch.save or pickle .*valueless.py:.*summon_full_params"
        ):
            save()


DRAWS = {
    "kaiming_uniform": lambda p: nn.init.kaiming_uniform_(p),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "trunc_normal": lambda p: nn.init.trunc_normal_(p),
    "bernoulli": lambda p: p.data.bernoulli_(0.3),
    "noise": lambda p: p.detach().add_(torch.randn_like(p) * 0.1),
    "dropout": lambda p: nn.functional.dropout(p, 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_generators_go_on_as_where_the_values_are(name):
    drawn = []
    for make in (nn.Parameter, lambda tensor: AbsentParameter(tensor.to("meta"))):
        torch.manual_seed(1)
        DRAWS[name](make(torch.ones(3, 2)))
        drawn.append(torch.rand(2).tolist())
    assert drawn[0] == drawn[1]


def begin_anew():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = smp.DistributedModel(raw_model())
    step = smp.step(lambda model, x: model(x))
    step(model, data()[0])
    torch.manual_seed(7)
    for layer in (model.module.first, model.module.second):
        layer.reset_parameters()
    return step(model, data()[0]).concat()


@pytest.mark.ranks
def test_layers_that_are_initialized_anew_get_the_numbers_of_one_process():
    plain = raw_model()
    torch.manual_seed(7)
    for layer in (plain.first, plain.second):
        layer.reset_parameters()
    # The parameters of torch_xla are drawn by another generator.
    for found in run_ranks(begin_anew, 2, env={"MPXLA_DEVICE": "pjrt"}):
        close(found, plain(data()[0]))


def test_masks_and_parametrizations_are_made_without_values():
    module = nn.Linear(2, 3)
    module.bias = absent()
    for _ in range(2):  # the second mask is of what the first has left
        prune.l1_unstructured(module, "bias", 1)
    assert module.bias_mask.is_meta and isinstance(module.bias_orig, AbsentParameter)
    again = nn.Parameter(module.bias_orig, requires_grad=False)
    assert isinstance(again, AbsentParameter) and not again.requires_grad
    assert not isinstance(module.bias_orig.detach(), nn.Parameter)


def test_copies_have_no_values_either():
    assert copy.deepcopy(absent().data).is_meta
    found = copy.deepcopy(absent())
    assert isinstance(found, nn.Parameter)
    with torch.no_grad(), pytest.raises(StepError, match=re.escape("model.summon_full_params()")):
        torch.ones(3).add_(found)


def test_modules_take_other_dtypes():
    module = nn.Linear(2, 3)
    module.bias = absent()
    module.to(torch.float64)
    assert module.bias.dtype == torch.float64
    assert isinstance(module.bias, nn.Parameter)


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 2).double(), absent() * 2])
def test_values_assigned_by_data_are_for_the_rank_that_holds_the_parameter(value):
    parameter = absent()
    parameter.data = value
    assert type(parameter) is AbsentParameter and parameter.is_meta and parameter.data.is_meta
    assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype)
    with pytest.raises(StepError, match="has no values here"):
        torch.ones(value.shape).add_(parameter.data)


def of_all_together():
    """The error of each rank where a step computes with earlier weights of both at once."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))

    @smp.step
    def evaluate(model, x):
        return model(x).sum()

    evaluate(model, torch.ones(2, 3))
    kept = [parameter.detach() * 2 for parameter in model.parameters()]

    @smp.step
    def step(model, x):
        pairs = zip(model.parameters(), kept, strict=True)
        loss = model(x).sum() + torch.cat([(p.exp() * own).flatten() for p, own in pairs]).norm()
        model.backward(loss)
        return loss

    with pytest.raises((StepError, PeerFailure)) as error:
        step(model, torch.ones(2, 3))
    return str(error.value)


@pytest.mark.ranks
def test_a_step_that_needs_values_of_several_ranks_in_one_tensor_says_so():
    for text in run_ranks(of_all_together, 2):
        assert "computes with a tensor of shape [4, 3] that has no values here" in text
        assert "(parameter - kept).square().sum()" in text
