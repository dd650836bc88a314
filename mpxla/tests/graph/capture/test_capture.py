"""Capture: roles of inputs and outputs, what modes mean, and what is refused."""

import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.stepgraph import InputKind, OutputKind, is_random
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

FLOATS = TensorLeaf((4, 6), torch.float32)
LABELS = TensorLeaf((4,), torch.int64)


def capture(model, function, *leaves):
    return capture_step(
        ToCapture(function, model, leaves or (FLOATS,), ModelState(model).canonical_names)
    )


def backward(tensors, grads=None):
    current_recorder().backward(tensors, grads)


def run(step, model, inputs):
    """Results of the captured graph on real values, without gradients."""
    with torch.no_grad():
        return outputs_of(step, model, inputs)


def outputs_of(step, model, inputs):
    """Outputs of the captured graph on real values."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    arguments = [
        inputs[role.index]
        if role.kind is InputKind.STEP_INPUT
        else step.constants[role.name]
        if role.kind is InputKind.CONSTANT
        else values[role.name]
        for role in step.inputs
    ]
    return torch.fx.GraphModule(nn.Module(), step.graph)(*arguments)


def targets(step):
    return [str(node.target) for node in step.graph.nodes if node.op == "call_function"]


def test_a_capture_that_fails_leaves_no_hooks_behind():
    """They would keep the model for as long as the process lives."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    with pytest.raises(ZeroDivisionError):
        capture(nn.Linear(6, 5), lambda leaves: 1 / 0)
    assert hooks == before


def test_captured_graph_computes_what_the_function_does():
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))

    def step(leaves):
        logits = model(leaves[0])
        loss = F.cross_entropy(logits, leaves[1])
        backward(loss)
        return {"loss": loss, "logits": [logits, None, "text", 3]}

    captured = capture(model, step, FLOATS, LABELS)
    assert captured.is_training
    assert [role.kind for role in captured.outputs] == [
        OutputKind.OBJECTIVE, OutputKind.RESULT, OutputKind.RESULT,
    ]  # fmt: skip
    leaves = captured.result_leaves
    assert [leaf.output for leaf in leaves] == [0, 1, None, None, None]
    assert [leaf.value for leaf in leaves[2:]] == [None, "text", 3]
    assert [leaf.is_number for leaf in leaves] == [False, False, False, False, True]
    x, y = torch.randn(4, 6), torch.tensor([0, 2, 1, 1])
    objective, loss, logits = run(captured, model, [x, y])
    assert torch.allclose(logits, model(x))
    assert torch.allclose(loss, F.cross_entropy(model(x), y))
    assert torch.equal(objective, loss)


def test_placeholders_have_canonical_names():
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    model["b"].weight = model["a"].weight
    captured = capture(model, lambda leaves: model["b"](model["a"](leaves[0])))
    names = {role.name for role in captured.inputs if role.kind is InputKind.PARAMETER}
    assert names == {"a.weight", "a.bias", "b.bias"}
    assert not captured.is_training


def test_modules_may_be_named_by_keywords():
    model = nn.ModuleDict({"class": nn.Linear(6, 2), "a b": nn.Linear(6, 2)})
    captured = capture(model, lambda leaves: model["class"](leaves[0]) + model["a b"](leaves[0]))
    x = torch.randn(4, 6)
    assert torch.allclose(run(captured, model, [x])[0], model["class"](x) + model["a b"](x))


def test_changed_buffers_are_outputs_and_the_model_keeps_its_own():
    model = nn.BatchNorm1d(6)

    def step(leaves):
        loss = model(leaves[0]).square().sum()
        backward(loss)
        return loss

    captured = capture(model, step)
    names = [role.name for role in captured.outputs if role.kind is OutputKind.BUFFER]
    assert sorted(names) == ["num_batches_tracked", "running_mean", "running_var"]
    assert torch.equal(model.running_mean, torch.zeros(6))
    assert type(model.weight) is nn.Parameter
    x = torch.randn(4, 6) + 1
    values = dict(
        zip([role.name for role in captured.outputs], run(captured, model, [x]), strict=True)
    )
    model(x)
    assert torch.allclose(values["running_mean"], model.running_mean)
    assert values["num_batches_tracked"] == 1


def test_integers_in_a_buffer_do_not_become_floats():
    model = nn.BatchNorm1d(6)

    def step(leaves):
        model.num_batches_tracked = model.num_batches_tracked / 2
        return model(leaves[0])

    with pytest.raises(CaptureError, match=r"tracked, int64\[\], another tensor, float32\[\]"):
        capture(model, step)


def test_evaluation_mode_is_the_modules_own():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    captured = capture(model, lambda leaves: model(leaves[0]))
    assert {role.kind for role in captured.outputs} == {OutputKind.RESULT}


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)


MAY_DRAW = {
    "dropout": nn.Dropout,
    "alpha dropout": nn.AlphaDropout,
    "dropout of channels": nn.Dropout1d,
    "attention": partial(Attention, 6, 2),
    "LSTM": partial(nn.LSTM, 6, 3, 2),
    "RNN": partial(nn.RNN, 6, 3, 2),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dropout", "LSTM")))
        for name in MAY_DRAW
    ],
)
def test_a_step_draws_numbers_where_pytorch_does(name, rate, is_training):
    """What a script shuffles afterwards would come in another order."""
    layer = MAY_DRAW[name](**{"p" if "out" in name else "dropout": rate})
    model = nn.Sequential(nn.Linear(6, 6), layer).train(is_training)
    before = torch.get_rng_state()
    model(torch.ones(5, 4, 6))
    draws = not torch.equal(torch.get_rng_state(), before)
    assert draws == (is_training and rate > 0)

    def step(leaves):
        found = model(leaves[0])
        loss = (found if isinstance(found, torch.Tensor) else found[0]).sum()
        backward(loss)
        return loss

    captured = capture(model, step, TensorLeaf((5, 4, 6), torch.float32))
    assert any(map(is_random, captured.graph.nodes)) == draws


def test_parameters_may_be_without_storage():
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    captured = capture(model, lambda leaves: model(leaves[0]))
    assert captured.output_nodes[0].meta["val"].shape == (4, 3)
    assert model.weight.device.type == "meta"


def test_nodes_know_whether_gradients_flow_through_them():
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 1))

    def step(leaves):
        loss = model(leaves[0]).sum()
        backward(loss)
        return loss

    captured = capture(model, step)
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    by_target = {str(n.target): n.meta["val"].requires_grad for n in calls}
    assert by_target["aten.tanh.default"] is False
    assert by_target["aten.sum.default"] is True


def test_region_without_gradients_stays_one():
    model = nn.Linear(6, 6)

    def step(leaves):
        with torch.no_grad():
            fixed = model(leaves[0])
        loss = (model(leaves[0]) * fixed).sum()
        backward(loss)
        return loss

    captured = capture(model, step)
    detached = [n for n in captured.graph.nodes if n.target is torch.ops.aten.detach.default]
    inside = [n for n in detached if not n.meta["val"].requires_grad and n.args[0].op != "output"]
    assert inside


def test_returned_item_is_a_number():
    model = nn.Linear(6, 1)

    def step(leaves):
        loss = model(leaves[0]).sum()
        backward(loss)
        return loss.item(), loss

    captured = capture(model, step)
    assert [leaf.is_number for leaf in captured.result_leaves] == [True, False]
    x = torch.randn(4, 6)
    _, number, loss = run(captured, model, [x])
    assert number == loss


def test_objective_of_a_tensor_with_a_gradient():
    model = nn.Linear(6, 3)

    def step(leaves):
        out = model(leaves[0])
        backward([out, out.sum()], [torch.full_like(out, 2.0), None])

    captured = capture(model, step)
    x = torch.randn(4, 6)
    first, second = run(captured, model, [x])
    assert torch.allclose(first, 2 * model(x).sum())
    assert torch.allclose(second, model(x).sum())


def test_device_names_mean_the_host():
    model = nn.Linear(6, 6)

    def step(leaves):
        x = leaves[0].to("cuda").cuda()
        return model(x + torch.ones(6, device="cuda").to(torch.device("xla")))

    captured = capture(model, step)
    x = torch.randn(4, 6)
    assert torch.allclose(run(captured, model, [x])[0], model(x + 1))


def test_tensors_of_the_script_are_constants():
    model, table = nn.Linear(6, 6), torch.randn(6)
    captured = capture(model, lambda leaves: model(leaves[0]) + table)
    (constant,) = captured.constants.values()
    assert torch.equal(constant, table)


# --- what is refused ----------------------------------------------------------------------------


def branch(leaves, model):
    loss = model(leaves[0]).sum()
    if loss > 0:
        loss = loss * 2
    backward(loss)


def branch_by_an_operator(leaves, model):
    found = model(leaves[0])
    return torch.cond(found.sum() > 0, torch.relu, torch.sin, (found,))


def plain_backward(leaves, model):
    model(leaves[0]).sum().backward()


def backward_of_vector(leaves, model):
    backward(model(leaves[0]))


def backward_of_constant(leaves, model):
    backward(model(leaves[0]).detach().sum())


def too_few_gradients(leaves, model):
    out = model(leaves[0])
    backward([out, out], [torch.ones_like(out)])


def gradient_of_other_shape(leaves, model):
    backward(model(leaves[0]), torch.ones(3))


def change_argument(leaves, model):
    leaves[0][leaves[0] > 0] = 0
    return model(leaves[0])


def change_parameter(leaves, model):
    with torch.no_grad():
        torch.ops.aten.mul_.Scalar(model.weight, 0.5)
    return model(leaves[0])


def reshape_argument(leaves, model):
    return model(leaves[0].unsqueeze_(0))


def hidden_tensor(leaves, model):
    return {model(leaves[0])}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (branch, r"depends on a tensor's value in Python at .*test_capture.py:\d+: if loss > 0"),
        (branch_by_an_operator, r"depends on a tensor's value in Python at .*: return torch\.cond"),
        (plain_backward, r"backward\(\) was called in a step function at .*Call model\.backward"),
        (backward_of_vector, r"tensor of shape \[4, 1\] without a gradient at .*test_capture.py"),
        (backward_of_constant, r"on a tensor that no parameter contributed to at .*Check that"),
        (too_few_gradients, r"got 2 tensors and 1 gradients at .*give one gradient"),
        (gradient_of_other_shape, r"gradient of shape \[3\] for a tensor of shape \[4, 1\]"),
        (
            change_argument,
            r"in place at .*test_capture.py:\d+: leaves\[0\]\[.* = 0, the tensor",
        ),
        (reshape_argument, r"shape of an argument in place, from \[4, 6\] to \[1, 4, 6\]\. Use"),
        (change_argument, r"arguments in place .*, the tensor float32\[4, 6\] .*x\.clone"),
        (
            change_parameter,
            r"constant weight in place at .*: torch.ops.aten.mul_.*Write param\.data\.copy_",
        ),
        (hidden_tensor, r"object of type set that holds tensors \(0\)"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_refused(function, text):
    model = nn.Linear(6, 1)
    with pytest.raises(CaptureError, match=text):
        capture(model, lambda leaves: function(leaves, model))
    assert current_recorder() is None
    assert type(model.weight) is nn.Parameter and model.weight.device.type == "cpu"
    capture(model, lambda leaves: model(leaves[0]))


def multiply_by_wrong_shape(leaves, model):
    return model(leaves[0]) @ torch.ones(3, 3)


@pytest.mark.parametrize("function", [branch, multiply_by_wrong_shape])
def test_torch_says_nothing_beside_the_error(function, capfd, monkeypatch):
    said = []
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        monkeypatch.setattr(logging.getLogger(name), "handle", said.append)
    model = nn.Linear(6, 1)
    with pytest.raises(CaptureError):
        capture(model, lambda leaves: function(leaves, model))
    assert (capfd.readouterr(), said) == (("", ""), [])


def test_trainable_parameter_outside_of_the_model_is_refused():
    model, other = nn.Linear(6, 6), nn.Linear(6, 5)
    text = (
        r"trainable parameter of shape \[5, 6\] that is not read from the model.*test_capture\.py"
    )
    with pytest.raises(CaptureError, match=text):
        capture(model, lambda leaves: other(model(leaves[0])))


@pytest.mark.parametrize("is_trained", [True, False])
def test_parameters_in_containers_are_those_of_the_model(is_trained):
    """Libraries list there what they penalize, with factors."""
    model, inputs = nn.Linear(6, 6), [torch.randn(4, 6)]
    held = [([model.weight], 0.1), ({"bias": model.bias}, 0.2)]

    def function(leaves):
        with torch.set_grad_enabled(is_trained):
            penalty = held[0][1] * held[0][0][0].T.square().sum()
            penalty += held[1][1] * held[1][0]["bias"].norm()
        return F.linear(leaves[0], held[0][0][0]).sum() + penalty

    step = capture(model, function)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # what a capture took as a constant would stay
    wanted = function(inputs).detach()
    (found,) = run(step, model, inputs)
    torch.testing.assert_close(found, wanted)


def test_module_outside_of_the_model_is_constant_without_gradients():
    model, teacher = nn.Linear(6, 6), nn.Linear(6, 6)

    def step(leaves):
        with torch.no_grad():
            wanted = teacher(leaves[0])
        loss = F.mse_loss(model(leaves[0]), wanted)
        backward(loss)
        return loss

    captured = capture(model, step)
    x = torch.randn(4, 6)
    assert torch.allclose(run(captured, model, [x])[1], F.mse_loss(model(x), teacher(x)))


def test_errors_of_the_user_stay_themselves():
    model = nn.Linear(6, 6)

    def step(leaves):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        capture(model, step)
    assert any(Path(__file__).name in note for note in caught.value.__notes__)


def test_errors_without_a_text_are_named():
    def step(leaves):
        raise NotImplementedError

    with pytest.raises(CaptureError, match=r"captured at .*: raise NotImplementedError: NotImpl"):
        capture(nn.Linear(6, 6), step)


def test_wrong_shapes_name_the_line():
    model = nn.Linear(5, 5)
    with pytest.raises((CaptureError, RuntimeError), match=r"test_capture.py:\d+|5x5"):
        capture(model, lambda leaves: model(leaves[0]))


def test_running_statistics_of_instance_norms_are_refused():
    model = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 1))
    rows = TensorLeaf((2, 4, 4), torch.float32)
    text = r"instance_norm in model\.0 .* updates running statistics.* track_running_stats=False"
    with pytest.raises(CaptureError, match=text):
        capture(model, lambda leaves: model(leaves[0]), rows)
    model.eval()
    step = capture(model, lambda leaves: model(leaves[0]), rows)
    values = torch.randn(2, 4, 4)
    torch.testing.assert_close(run(step, model, [values])[0], model(values))


class Inverse(nn.Module):
    """Has an operator that there is not in 16 bits."""

    def __init__(self, is_widened):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.is_widened = is_widened

    def forward(self, x):
        weight = self.weight.float() if self.is_widened else self.weight
        return x @ torch.linalg.inv(weight).to(x.dtype)


def test_a_module_that_needs_float32_is_named():
    def step(leaves):
        backward(model(leaves[0]).float().sum())

    narrow = TensorLeaf((4, 6), torch.bfloat16)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Inverse(False))).to(torch.bfloat16)
    with pytest.raises(CaptureError, match=r"The module '1.0' \(Inverse\) needs float32 there"):
        capture(model, step, narrow)
    model[1][0].is_widened = True
    assert capture(model, step, narrow).is_training


@pytest.mark.parametrize(
    "bounds, named, kind, range_",
    [
        ((2, 5), {}, torch.float32, (2, 5)),
        ((), {"from": -3, "to": 3}, torch.int64, (-3, 3)),
        ((4,), {"to": 6}, torch.float32, (4, 6)),
        ((250, None), {}, torch.uint8, (250, 256)),
        ((7,), {}, torch.float32, (0, 7)),
        ((), {"to": 4}, torch.float32, (0, 4)),
        ((), {"generator": torch.Generator()}, torch.float32, (0, 2**24 + 1)),
    ],
)
def test_numbers_drawn_in_place_between_two_bounds(bounds, named, kind, range_):
    model = nn.Linear(6, 6)

    def step(leaves):
        drawn = torch.empty(400, dtype=kind)
        assert drawn.random_(*bounds, **named) is drawn
        return drawn, model(leaves[0])

    captured = capture(model, step)
    (found, _) = run(captured, model, [torch.ones(4, 6)])
    assert any(map(is_random, captured.graph.nodes))
    assert found.dtype is kind
    numbers = set(found.long().tolist())
    assert range_[0] <= min(numbers) and max(numbers) < range_[1]
    if range_[1] < 300:
        assert numbers == set(range(*range_))


def test_bounds_that_have_no_number_between_them():
    model = nn.Linear(6, 6)
    with pytest.raises(CaptureError, match=r"random_\(5, 2\) at .*test_capture.py:.*no number"):
        capture(model, lambda leaves: model(leaves[0]) * torch.empty(6).random_(5, 2))


@pytest.mark.parametrize(
    "function",
    [
        torch.cov,
        lambda x: torch.cov(x, correction=2, fweights=torch.arange(6), aweights=x[1].square()),
        torch.corrcoef,
        *(
            pytest.param(function, marks=pytest.mark.slow)
            for function in (
                lambda x: x.cov(correction=0),
                lambda x: torch.cov(x[0]),
                lambda x: torch.cov(x, fweights=torch.tensor([1, 2, 0, 3, 1, 1])),
                lambda x: torch.cov(x, aweights=x[0].square()),
                lambda x: torch.cov(x[:, :2], correction=5),
                lambda x: x[1].corrcoef(),
                lambda x: torch.cov(torch.complex(x, x.flip(0))),
                lambda x: torch.corrcoef(torch.complex(x, x.flip(0))),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom is <= 0")
def test_covariances(function):
    model, x = nn.Linear(6, 6), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    captured = capture(model, lambda leaves: function(model(leaves[0])))
    (found,) = run(captured, model, [x])
    torch.testing.assert_close(found, function(model(x)).detach(), equal_nan=True)


def test_a_ctc_loss_whose_lengths_are_numbers():
    model, labels = nn.Linear(6, 6), torch.tensor([[1, 2, 3], [4, 4, 5]])
    x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0))
    losses = (
        lambda p: F.ctc_loss(p, labels, [8, 7], (3, 2)),
        lambda p: nn.CTCLoss()(p, labels, (8, 7), target_lengths=[3, 2]),
        lambda p: torch.ctc_loss(p, labels, [8, 7], [3, 2]),
        lambda p: F.ctc_loss(p, labels, torch.tensor([8, 7]), torch.tensor([3, 2])),
    )
    for loss in losses:
        leaf = TensorLeaf((8, 2, 6), torch.float32)
        captured = capture(model, lambda leaves, f=loss: f(model(leaves[0]).log_softmax(-1)), leaf)
        expected = loss(model(x).log_softmax(-1)).detach()
        torch.testing.assert_close(run(captured, model, [x])[0], expected)


def test_a_profiler_that_keeps_frames_is_named():
    """Torch loses track of what a frame still holds, and takes it for a constant."""
    model, frames = nn.Linear(6, 6), []

    def step(leaves):
        sys.setprofile(lambda frame, event, arg: frames.append(frame))
        try:
            return model(leaves[0]) + torch.arange(6)
        finally:
            sys.setprofile(None)

    with pytest.raises(CaptureError, match=r"a profiler or debugger, in a thread, .* Start it"):
        capture(model, step)
    frames.clear()


def test_tensors_kept_outside_of_the_model_are_named():
    model, kept = nn.Linear(6, 6), []

    def step(leaves):
        kept.append(model(leaves[0]).detach())
        return torch.stack(kept).sum()

    capture(model, step)
    with pytest.raises(CaptureError, match=r"appends tensors to a list, .* collect them outside"):
        capture(model, step)


def test_the_text_of_a_program_is_not_written_for_every_region(monkeypatch):
    """Torch does that in a time that grows with the square of the regions."""
    sizes, recompile = [], torch.fx.GraphModule.recompile

    def recompile_noted(module):
        sizes.append(len(module.graph.nodes))
        return recompile(module)

    monkeypatch.setattr(torch.fx.GraphModule, "recompile", recompile_noted)
    model = nn.Linear(6, 6)

    def function(leaves):
        (x,) = leaves
        for _ in range(20):
            with torch.no_grad():
                shift = x.mean()
            x = model(x) - shift
        return x

    step = capture(model, function)
    assert sum(size > 50 for size in sizes) < 15
    x = torch.randn(4, 6)
    torch.testing.assert_close(run(step, model, [x])[0], function([x]).detach())


# Torch hides that one of its own only where warnings are shown.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("region", ["autocast", "no_grad", "none"])
def test_writes_to_parts_of_views_inside_operators(region):
    """Autograd makes these views again, of tensors that the program has not."""
    regions = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad,
        "none": contextlib.nullcontext,
    }
    torch.manual_seed(0)
    model, weights, x = nn.Linear(8, 8), torch.randn(4, 8, 8), torch.randn(3, 4, 8)

    def function(leaves):
        with regions[region]():
            y = model(leaves[0])
            y[:, ::2] *= 0.5
        z = torch.vmap(torch.matmul, in_dims=(1, 0), out_dims=1)(y.float(), weights)
        z = z + model(leaves[0])
        z[..., 0].add_(1.0)
        return z

    step = capture(model, function, TensorLeaf((3, 4, 8), torch.float32))
    torch.testing.assert_close(run(step, model, [x])[0], function([x]).detach())
    assert len(step.constants) == 1
