"""Architectures of transformers in two stages against plain PyTorch: all, and a fast sample."""

import pytest
import torch

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

SAMPLE = ["opt"]
GROUP = 8
"""Architectures for each start of a process, so that a busy machine has time enough for them."""


def tried(names):
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.tests.architectures import outcomes

    current_device()
    return outcomes(names)


@pytest.mark.slow
def test_a_sample_trains():
    (found,) = run_ranks(tried, 1, SAMPLE, timeout_s=300)
    assert found == dict.fromkeys(SAMPLE, ("passed", ""))


def test_routers_have_no_ties():
    from mpxla.tests.architectures import built

    model, _ = built("afmoe")
    routers = [p for name, p in model.named_parameters() if "router" in name]
    assert routers and all(p.unique().numel() > p.shape[0] for p in routers)


def test_ill_conditioned_values_have_the_tolerance_of_float32():
    from mpxla.tests.stages_by_hand import Outcome, differences, rounding_errors, run_plainly

    class Amplifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.7]))

        def forward(self, x):
            return ((self.weight + x) - x - self.weight + 1e-6 * self.weight) * 1e3

    model, batch = Amplifier(), {"x": torch.tensor([1e3 / 3])}

    def loss_of(model, batch):
        return model(batch["x"]).sum()

    plain = run_plainly(model, loss_of, batch)
    errors = rounding_errors(model, loss_of, batch)
    near = Outcome(plain.loss + 2 * errors["loss"], plain.gradients)
    far = Outcome(plain.loss + 5 * errors["loss"], plain.gradients)
    assert errors["loss"] > 1e-4 * abs(plain.loss)
    assert "loss off by" in differences(plain, near)
    assert differences(plain, near, rounding=errors) == ""
    assert "loss off by" in differences(plain, far, rounding=errors)
    other = Outcome(plain.loss, {"weight": 1.2 * plain.gradients["weight"]})
    assert "gradient of weight off by" in differences(plain, other, rounding=errors)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_architecture_trains_wrong_numbers():
    from mpxla.tests.architectures import architectures

    names = list(architectures())
    found = {}
    for first in range(0, len(names), GROUP):
        (part,) = run_ranks(tried, 1, names[first : first + GROUP], timeout_s=3600)
        found.update(part)
    wrong = {name: why for name, (result, why) in found.items() if result == "different"}
    assert wrong == {}
    assert sum(result == "passed" for result, _ in found.values()) >= 60
