"""The plain kin of apex's fused optimizers: their formulas, and the same over several ranks."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from mpxla.compat import CompatError
from mpxla.compat.optimizers import FusedLamb, FusedNovoGrad
from mpxla.tests.ranks.run import run_ranks

RATE, BETAS, EPSILON = 0.1, (0.9, 0.95), 1e-6
STEPS = [[np.array([[0.5, -2.0], [1.0, 0.25]]), np.array([3.0, -1.0])] for _ in range(1)]
STEPS += [[-0.5 * STEPS[0][0] + 0.1, 0.3 * STEPS[0][1]], [2 * STEPS[0][0], -STEPS[0][1] - 1]]
START = [np.array([[1.0, 2.0], [-1.0, 0.5]]), np.zeros(2)]


def lamb(decay=0.1, limit=1.0, average=True, correct=True, in_update=True, always=False):
    """Algorithm 2 of the paper, with apex's settings."""
    (beta1, beta2), values = BETAS, [value.copy() for value in START]
    moments = [[0.0, 0.0] for _ in values]
    for step, gradients in enumerate(STEPS, 1):
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        factor = min(1.0, limit / norm) if limit else 1.0
        for value, gradient, moment in zip(values, gradients, moments, strict=True):
            g = gradient * factor + (0 if in_update else decay * value)
            moment[0] = beta1 * moment[0] + ((1 - beta1) if average else 1) * g
            moment[1] = beta2 * moment[1] + (1 - beta2) * g**2
            m = moment[0] / (1 - beta1**step) if correct else moment[0]
            v = moment[1] / (1 - beta2**step) if correct else moment[1]
            update = m / (np.sqrt(v) + EPSILON) + (decay * value if in_update else 0)
            norms = np.linalg.norm(value), np.linalg.norm(update)
            is_scaled = (decay or always) and norms[0] > 0 and norms[1] > 0
            value -= RATE * (norms[0] / norms[1] if is_scaled else 1) * update
    return values


def novograd(decay=0.1, inside=False, average=True, correct=True, order=2, from_zero=False):
    """Algorithm 1 of the paper, with apex's settings."""
    (beta1, beta2), values = BETAS, [value.copy() for value in START]
    moments = [[0.0, 0.0] for _ in values]
    for step, gradients in enumerate(STEPS, 1):
        for value, g, moment in zip(values, gradients, moments, strict=True):
            norm = np.sqrt((g**2).sum()) if order == 2 else np.abs(g).max()
            before = norm if step == 1 and not from_zero else moment[1]
            if order == 2:
                moment[1] = np.sqrt(beta2 * before**2 + (1 - beta2) * norm**2)
            else:
                moment[1] = beta2 * before + (1 - beta2) * norm
            v = moment[1] / np.sqrt(1 - beta2**step) if correct else moment[1]
            g = g / (v + EPSILON) + decay * value if inside else g
            moment[0] = beta1 * moment[0] + ((1 - beta1) if average else 1) * g
            m = moment[0] / (1 - beta1**step) if correct else moment[0]
            value -= RATE * (m if inside else m / (v + EPSILON) + decay * value)
    return values


def trained(kind, **settings):
    parameters = [nn.Parameter(torch.tensor(value, dtype=torch.float32)) for value in START]
    optimizer = kind(parameters, lr=RATE, betas=BETAS, eps=EPSILON, **settings)
    for gradients in STEPS:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"weight_decay": 0.1}, {}),
        ({"weight_decay": 0.1, "max_grad_norm": None}, {"limit": 0}),
        ({"weight_decay": 0.1, "adam_w_mode": False}, {"in_update": False}),
        ({"weight_decay": 0.0}, {"decay": 0}),
        ({"weight_decay": 0.0, "use_nvlamb": True}, {"decay": 0, "always": True}),
        (
            {"weight_decay": 0.1, "grad_averaging": False, "bias_correction": False},
            {"average": False, "correct": False},
        ),
    ],
)
def test_lamb(settings, expected):
    for found, value in zip(trained(FusedLamb, **settings), lamb(**expected), strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"weight_decay": 0.1}, {}),
        ({"weight_decay": 0.1, "reg_inside_moment": True}, {"inside": True}),
        ({"weight_decay": 0.1, "norm_type": 0}, {"order": 0}),
        ({"weight_decay": 0.1, "init_zero": True}, {"from_zero": True}),
        (
            {"weight_decay": 0.1, "grad_averaging": False, "bias_correction": False},
            {"average": False, "correct": False},
        ),
    ],
)
def test_novograd(settings, expected):
    for found, value in zip(trained(FusedNovoGrad, **settings), novograd(**expected), strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)


@pytest.mark.unit
def test_those_of_timm_agree():
    """Its LAMB is meant to behave as apex's, its NovoGrad is NVIDIA's first one."""
    optim = pytest.importorskip("timm.optim", reason="timm is not installed")
    for found, value in zip(
        trained(FusedLamb, weight_decay=0.1), trained(optim.Lamb, weight_decay=0.1), strict=True
    ):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)
    first = {"reg_inside_moment": True, "grad_averaging": False, "bias_correction": False}
    for found, value in zip(
        trained(FusedNovoGrad, weight_decay=0.1, **first),
        trained(optim.NvNovoGrad, weight_decay=0.1),
        strict=True,
    ):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)


@pytest.mark.unit
def test_settings_that_are_not_there():
    parameters = [nn.Parameter(torch.ones(2))]
    for kind in (FusedLamb, FusedNovoGrad):
        with pytest.raises(CompatError, match=f"{kind.__name__} has no AMSGrad variant"):
            kind(parameters, amsgrad=True)
        with pytest.raises(CompatError, match=r"call optimizer.zero_grad\(set_to_none=False\)"):
            kind(parameters, set_grad_none=False)
    with pytest.raises(CompatError, match=r"norm_type=1\): give 2, or 0 for infinity"):
        FusedNovoGrad(parameters, norm_type=1)


# --- over ranks ---------------------------------------------------------------------------------

SETTINGS = {
    "FusedLAMB": {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.02},
    "FusedNovoGrad": {"lr": 0.05, "weight_decay": 0.1},
}


class Narrow(nn.Module):
    """Its last stage has no parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.last = nn.Tanh()

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.first(x))))


def batches():
    torch.manual_seed(4)
    return torch.randn(4, 4, 3) * torch.tensor([1.0, 5.0, 0.1, 2.0]).reshape(4, 1, 1)


def train_plainly(kind, settings):
    model = Narrow()
    optimizer = kind(model.parameters(), **settings)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def train_on_stages(name, stage_of_second):
    import mpxla as smp
    from mpxla.compat.launcher import mapped

    with mapped():
        import smdistributed.modelparallel.torch.optimizers as optimizers

        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False,
                  "default_partition": 0})  # fmt: skip
        plain = Narrow()
        smp.set_partition(plain.second, stage_of_second)
        smp.set_partition(plain.last, 1)
        model = smp.DistributedModel(plain)
        optimizer = getattr(optimizers, name)(model.parameters(), **SETTINGS[name])
        optimizer = smp.DistributedOptimizer(optimizer)

        @smp.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for x in batches():
            optimizer.zero_grad()
            train(model, x)
            optimizer.step()
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        return copy.deepcopy(weights), len(list(model.local_parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "stage_of_second"),
    [
        ("FusedNovoGrad", 0),
        pytest.param("FusedLAMB", 1, marks=pytest.mark.slow),
        pytest.param("FusedLAMB", 0, marks=pytest.mark.slow),
        pytest.param("FusedNovoGrad", 1, marks=pytest.mark.slow),
    ],
)
def test_stages_are_one_process(name, stage_of_second):
    kind = {"FusedLAMB": FusedLamb, "FusedNovoGrad": FusedNovoGrad}[name]
    expected = train_plainly(kind, SETTINGS[name])
    found = run_ranks(train_on_stages, 2, name, stage_of_second)
    assert [count for _, count in found] == ([4, 0] if stage_of_second == 0 else [2, 2])
    torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-6)
