"""What saving the module of a `DistributedModel` writes: all of it, for any machine."""

import copy
import io

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import RankError, run_ranks

pytestmark = pytest.mark.ranks


class Tied(nn.Module):
    """Two layers on two stages with one weight, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x):
        return self.second(self.first(x).relu() * self.scale)


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def make():
    torch.manual_seed(0)
    return Tied()


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def save_everything():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    before = saved(model.module)
    train(model, torch.ones(4, 3))
    optimizer.step()
    live = model.module.state_dict(keep_vars=True)
    places = {value.device.type for value in live.values()}
    copied = copy.deepcopy(model).module.state_dict(keep_vars=True)
    files = [saved(model), saved(model.module), saved({"model": model.module, "step": 1})]
    files.append(saved(model.module.state_dict()))
    smp.shutdown()
    with pytest.raises(StepError, match=r"asked for by torch.save"):  # nobody can be asked any more
        saved(model.module)
    device = backend_here().device.type
    return before, files, places, {value.device.type for value in copied.values()}, device


def test_everything_that_saves_the_module_writes_the_whole_model_for_the_host():
    plain, x = make(), torch.ones(4, 3)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for start, files, places, copied, device in run_ranks(save_everything, 2):
        assert places == copied == {device, "meta"}  # live values, and copies in memory, stay parts
        start = load(start)
        assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
        model, module, inside, values = map(load, files)
        for whole in (model, module, inside["model"]):
            assert type(whole) is Tied and whole.second.weight is whole.first.weight
            assert vars(whole).keys() == vars(plain).keys() and not whole._state_dict_hooks
            assert torch.equal(whole.scale, plain.scale)
            torch.testing.assert_close(whole.state_dict(), plain.state_dict())
            torch.testing.assert_close(whole(x), plain(x))
        torch.testing.assert_close(dict(values), dict(plain.state_dict()))
        assert values["second.weight"].data_ptr() == values["first.weight"].data_ptr()


def load(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def save_on_one_rank():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make())
    train(model, torch.ones(4, 3))
    if smp.rank() == 0:
        saved(model.module)
    else:
        train(model, torch.ones(4, 3))


def test_saving_on_one_rank_alone_is_an_error_that_names_both_lines():
    with pytest.raises(RankError, match=r"(?s)saving the model.*test_whole.py"):
        run_ranks(save_on_one_rank, 2)
