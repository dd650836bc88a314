"""State dicts know the versions of modules, by which these load what older ones have saved."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Scale(nn.Module):
    """Has saved the logarithm of what it saves now, before it had a version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return x * self.weight

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *others)


def net():
    return nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4), Scale())


def exchanged(folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain, model = net(), smp.DistributedModel(net())

    @smp.step
    def step(model, x):
        return model(x).sum()

    def both():
        model.load_state_dict(plain.state_dict())
        model.load_state_dict(model.state_dict())
        plain.load_state_dict(model.state_dict())
        plain.load_state_dict(model.module.state_dict())
        copied = copy.deepcopy(model)
        plain.load_state_dict(copied.state_dict())
        copied.load_state_dict(plain.state_dict())
        AveragedModel(plain).load_state_dict(AveragedModel(model).state_dict())
        return [plain[1].weight[0].item(), copied.state_dict()["3.weight"][0].item()]

    found = both()
    step(model, torch.ones(4, 4))
    found += both()
    model.load_state_dict(model.local_state_dict())
    smp.save_checkpoint(folder, tag="one", partial=True, model=model)
    smp.resume_from_checkpoint(folder, tag="one", partial=True)
    step(model, torch.ones(4, 4))
    found.append(model.state_dict()["1.weight"][0].item())
    model.load_state_dict(dict(model.state_dict()))  # as saved by an old version
    return found, model.state_dict()["1.weight"][0].item()


def test_versions_are_kept(tmp_path):
    for found, old in run_ranks(exchanged, 2, str(tmp_path)):
        assert found == [2.0] * 5
        assert old == pytest.approx(2.718281828**2)
