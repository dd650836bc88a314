"""Steps that change `requires_grad` of parameters have the gradients and flags of PyTorch.

Each case runs once plainly, and once as a captured graph on the same values.
"""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture import step as capture
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.stepgraph import LeftFlag, OutputKind
from mpxla.graph.user_code import until_captured
from mpxla.kept import Kept, open_kept
from mpxla.runtime.state import ModelState
from mpxla.runtime.ways import problem_of_flags
from mpxla.tests.graph.capture.test_capture import outputs_of

pytestmark = pytest.mark.unit

LEAVES = [TensorLeaf((4, 6), torch.float32)] * 2


class Gan(nn.Module):
    """A generator and a critic."""

    def __init__(self, enter=None):
        super().__init__()
        self.forger = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        enter = enter or nn.Linear(6, 8)
        self.critic = nn.Sequential(enter, nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

    def forged(self, x, backward):
        """The generator's loss, differentiated."""
        fake = self.forger(x)
        backward(-self.critic(fake).mean())
        return fake.detach()

    def judged(self, fake, real, backward):
        backward((self.critic(fake).square() + (self.critic(real) - 1).square()).mean())


class Whole(Gan):
    """Freezes its critic in `forward`, as adversarial autoencoders do."""

    def forward(self, x, real):
        fake = self.forger(x)
        turn(self.critic, False)
        loss = -self.critic(fake).mean()
        turn(self.critic, True)
        return loss + (self.critic(fake.detach()) - self.critic(real)).square().mean()


def turn(module, value):
    for parameter in module.parameters():
        parameter.requires_grad = value


def critic_last(model, x, real, backward):
    turn(model.critic, False)
    fake = model.forged(x, backward)
    turn(model.critic, True)
    model.judged(fake, real, backward)


def critic_first(model, x, real, backward):
    """What pix2pix does: the critic stays frozen."""
    fake = model.forger(x)
    model.critic.requires_grad_(True)
    model.judged(fake.detach(), real, backward)
    model.critic.requires_grad_(False)
    backward(-model.critic(fake).mean())


def in_forward(model, x, real, backward):
    backward(model(x, real))


def toggled(model, x, real, backward):
    """One forward, and each optimizer's parameters in turn."""
    fake = model.forger(x)
    turn(model.forger, False)
    model.judged(fake.detach(), real, backward)
    turn(model.forger, True)
    turn(model.critic, False)
    backward(-model.critic(fake).mean())
    turn(model.critic, True)


def partly(model, x, real, backward):
    """Some stay frozen, and flags are read in between."""
    model.critic[0].weight.requires_grad_(False)
    model.forged(x, backward)
    for parameter in model.critic.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    assert [p.requires_grad for p in model.critic.parameters()] == [True] + [False] * 5
    assert all(p.is_leaf for p in model.critic.parameters())
    model.judged(x, real, backward)
    turn(model.critic[3], True)


def before_the_backward(model, x, real, backward):
    """Frozen after its use: `AccumulateGrad` drops the gradient."""
    fake = model.forger(x)
    loss = -model.critic(fake).mean()
    turn(model.critic, False)
    backward(loss)


def between_use_and_backward(model, x, real, backward):
    """Frozen and unfrozen again before the backward: it makes no difference."""
    loss = -model.critic(model.forger(x)).mean()
    turn(model, False)
    turn(model, True)
    backward(loss)


def thawed_by_layer(model, x, real, backward):
    """From a model that is frozen when the step begins."""
    loss = model.critic(real).square().mean()
    turn(model.critic[3], True)
    backward(loss + model.critic(model.forger(x)).mean())


def penalized(model, x, real, backward):
    turn(model.critic, False)
    fake = model.forged(x, backward)
    turn(model.critic, True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model.critic[0].bias.requires_grad_(False)
        torch.autograd.grad(model.critic(x).sum(), model.critic[0].bias)
    model.critic[0].bias.requires_grad_(True)
    moved = (fake + x).requires_grad_()
    (slopes,) = torch.autograd.grad(model.critic(moved).sum(), moved, create_graph=True)
    backward(slopes.norm(2, 1).mean() + model.critic(real).mean())


def checkpointed(is_reentrant):
    def step(model, x, real, backward):
        def critic(values):
            return torch.utils.checkpoint.checkpoint(
                model.critic, values, use_reentrant=is_reentrant
            )

        fake = model.forger(x)
        turn(model.critic, False)
        backward(-critic(fake).mean())
        turn(model.critic, True)
        backward(critic(real + 0 * fake).square().mean())

    return step


def functional(model, x, real, backward):
    turn(model.critic, False)
    given = {name: p * 1 for name, p in model.critic.named_parameters()}
    own = dict(model.critic.named_parameters())
    fake = model.forger(x)
    turn(model.critic, True)
    loss = torch.func.functional_call(model.critic, given, (fake,)).mean()
    twin = copy.deepcopy(model.critic[0].weight)
    backward(loss + (fake @ twin.T).mean())
    turn(model.critic[0], False)
    backward(torch.func.functional_call(model.critic, own, (real,)).mean())


def written(model, x, real, backward):
    turn(model.critic, False)
    model.critic[0].weight.mul_(0.5)
    model.critic[0].bias.data.add_(1)
    turn(model.critic, True)
    backward(model.critic(real).square().mean())


def viewed(model, x, real, backward):
    weight = model.critic[0].weight
    turn(model.critic[0], False)
    view, turned = weight.view(-1), weight.T
    turn(model.critic[0], True)
    fake = model.forger(x)
    backward((fake @ turned).square().mean() + (view * fake.mean()).sum())
    backward(model.critic(real).square().mean())


def mixed(model, x, real, backward):
    with torch.autocast("cpu", torch.bfloat16):
        turn(model.critic, False)
        loss = -model.critic(model.forger(x)).float().mean()
    turn(model.critic, True)
    backward(loss)
    backward(model.critic(real).mean())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0].squeeze(1)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.layer = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.enter(x).unsqueeze(1)
        return self.layer(x, x, x, need_weights=False)[0].squeeze(1)


def normed():
    torch.manual_seed(7)
    return Gan(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)))


def frozen(build):
    def made():
        model = build()
        turn(model.critic, False)
        return model

    return made


CASES = {
    "critic last": (Gan, critic_last),
    "critic last, frozen before": (frozen(Gan), critic_last),
    "critic first": (Gan, critic_first),
    "critic first, frozen before": (frozen(Gan), critic_first),
    "in forward": (Whole, in_forward),
    "in forward, frozen before": (frozen(Whole), in_forward),
    "toggled": (Gan, toggled),
    "partly": (Gan, partly),
    "before the backward": (Gan, before_the_backward),
    "between use and backward": (Gan, between_use_and_backward),
    "by layer": (frozen(Gan), thawed_by_layer),
    "penalized": (Gan, penalized),
    "penalized, frozen before": (frozen(Gan), penalized),
    "checkpointed": (Gan, checkpointed(False)),
    "checkpointed again": (Gan, checkpointed(True)),
    "functional": (Gan, functional),
    "written": (Gan, written),
    "viewed": (Gan, viewed),
    "mixed": (Gan, mixed),
    "recurrent": (lambda: Gan(Recurrent()), critic_last),
    "attention": (lambda: Gan(Attending()), critic_last),
    "normed": (normed, critic_last),
}
QUICK = (
    *("critic last", "critic first, frozen before", "in forward", "toggled", "partly"),
    *("by layer", "between use and backward", "checkpointed", "written"),
)


def built(case):
    torch.manual_seed(3)
    build, function = CASES[case]
    return build(), function, (torch.randn(4, 6), torch.randn(4, 6))


def captured(model, function, kept=Kept()):  # noqa: B008 - it keeps nothing
    def run(leaves):
        function(model, *leaves, current_recorder().backward)

    names, thawed = ModelState(model).canonical_names, set()
    return until_captured(
        lambda: capture_step(ToCapture(run, model, LEAVES, names, kept=kept, thawed=thawed))
    )


def flags_of(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
def test_gradients_and_flags_are_pytorchs(case):
    model, function, inputs = built(case)
    plain = copy.deepcopy(model)
    before = flags_of(model)
    step = captured(model, function)
    function(plain, *inputs, lambda loss: loss.backward(retain_graph=True))
    wanted = {name: p.grad for name, p in plain.named_parameters()}

    assert flags_of(model) == before
    left = {name: flag.value for name, flag in step.flags.items()}
    assert {**before, **left} == flags_of(plain)
    assert all(flag.is_other == (flag.value != before[n]) for n, flag in step.flags.items())

    roles = step.roles.items()
    trained = {r.name for n, r in roles if n.meta["val"].requires_grad}
    model.requires_grad_(True)
    ends = zip(outputs_of(step, model, inputs), step.outputs, strict=True)
    sum(value for value, role in ends if role.kind is OutputKind.OBJECTIVE).backward()
    found = {n: p.grad if n in trained else None for n, p in model.named_parameters()}
    torch.testing.assert_close(found, wanted)


def dropped_and_trained(model, x, real, backward):
    loss = model.critic(model.forger(x)).mean()
    turn(model.critic, False)
    backward(loss)
    turn(model.critic, True)
    backward(model.critic(real).mean())


def all_frozen(model, x, real, backward):
    loss = model.critic(real).mean()
    turn(model.critic, False)
    backward(loss)


def thawed_before_the_region_runs_again(model, x, real, backward):
    turn(model.critic, False)
    fake = model.forger(x)
    loss = torch.utils.checkpoint.checkpoint(model.critic, fake, use_reentrant=True).mean()
    turn(model.critic, True)
    backward(loss)


def of_another_model(model, x, real, backward):
    nn.Linear(6, 1).weight.requires_grad_(True)
    OUTSIDE.requires_grad_(False)


OUTSIDE = nn.Linear(6, 1)
HERE = r" at \S*test_flags.py:\d+"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            dropped_and_trained,
            f"backward was called{HERE}.* while parameters were frozen .*critic.0.bias, "
            f"critic.0.weight, critic.1.bias, .*Freeze parameters before the loss is computed",
        ),
        (all_frozen, f"backward was called{HERE}.* all parameters .* were frozen .critic.0.bias"),
        (
            thawed_before_the_region_runs_again,
            f"backward was called{HERE}.* checkpointed region .*Use use_reentrant=False",
        ),
        (of_another_model, f"changes requires_grad of a parameter of shape .1, 6. .*{HERE}"),
    ],
)
def test_what_is_refused(function, text):
    with pytest.raises(CaptureError, match=text):
        captured(Gan(), function)


def test_flags_tell_whether_a_step_goes_by_those_that_it_finds():
    last, first = (captured(Gan(), step).flags for step in (critic_last, critic_first))
    assert last["critic.0.bias"] == LeftFlag(value=True, is_other=False, is_early=True)
    assert first["critic.0.bias"] == LeftFlag(value=False, is_other=True, is_early=True)
    flags = captured(Gan(), partly).flags
    assert flags["critic.3.bias"] == LeftFlag(value=True, is_other=False, is_early=False)
    assert flags["critic.0.weight"] == LeftFlag(value=True, is_other=False, is_early=True)
    again = captured(frozen(Gan)(), critic_first).flags
    assert again["critic.0.bias"] == LeftFlag(value=False, is_other=False, is_early=True)
    by_layer = captured(frozen(Gan)(), thawed_by_layer).flags
    assert by_layer["critic.3.bias"] == LeftFlag(value=True, is_other=True, is_early=False)


def test_microbatches_begin_with_the_flags_that_others_have_left():
    def way(build, function):
        step = captured(build(), function)
        return SimpleNamespace(cut=SimpleNamespace(step=step))

    first, last, layer = way(Gan, critic_first), way(Gan, critic_last), way(Gan, toggled)
    assert problem_of_flags("step", [first] * 3) is None
    assert problem_of_flags("step", [first, last, layer]) is None
    thawing = way(frozen(Gan), thawed_by_layer)
    assert problem_of_flags("step", [thawing]) is None
    assert re.search(
        "step: microbatch 1 begins .*critic.3", problem_of_flags("step", [thawing] * 2)
    )
    assert re.search("microbatch 2 begins", problem_of_flags("step", [last, first, layer]))


def test_what_an_earlier_start_has_kept_is_for_the_same_flags(tmp_path, monkeypatch):
    def generator_only(model, x, real, backward):
        backward(-model.critic(model.forger(x)).mean())

    def trained(function):
        step = captured(Gan(), function, open_kept(str(tmp_path), "cpu-1"))
        return {role.name for node, role in step.roles.items() if node.meta["val"].requires_grad}

    functions = generator_only, before_the_backward, between_use_and_backward
    first = [trained(function) for function in functions]
    monkeypatch.setattr(capture, "functionalize", None)
    assert [trained(function) for function in functions] == first
    assert len(first[0]) == len(first[2]) == 10
    assert first[1] == {name for name in first[0] if name.startswith("forger")}


def test_parameters_that_the_script_holds_are_those_of_the_model():
    """As the ones of `optimizer.param_groups`, which have no stand-ins."""
    model = frozen(Gan)()
    held = [*model.critic.parameters()]
    seen = []

    def step(model, x, real, backward):
        seen.append([p.requires_grad for p in held])
        for parameter in held[:2]:
            parameter.requires_grad = True
        seen.append([p.requires_grad for p in held])
        backward(model.critic(real).mean())

    flags = captured(model, step).flags
    assert {name: flag.value for name, flag in flags.items()} == {
        "critic.0.weight": True, "critic.0.bias": True,
    }  # fmt: skip
    assert seen[-2:] == [[False] * 6, [True] * 2 + [False] * 4]
    assert not any(parameter.requires_grad for parameter in held)
