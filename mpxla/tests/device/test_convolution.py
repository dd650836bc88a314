"""Convolutions as products: equal to PyTorch's, forward and backward, and what is rewritten."""

import operator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from mpxla.device import convolution
from mpxla.device.convolution import (
    Window,
    contract,
    expand_convolutions,
    spread,
    weight_gradient,
)
from mpxla.device.torch_xla.lowering import make_lowering
from mpxla.tests.ranks.run import run_ranks

aten = torch.ops.aten


@st.composite
def layers(draw):
    """Arguments of a convolution or a transposed one: shapes, stride and so on."""
    dims = draw(st.integers(1, 3))
    sizes = st.integers(1, 3)

    def each(values):
        return draw(st.lists(values, min_size=dims, max_size=dims))

    kernel, stride, dilation, padding = each(sizes), each(sizes), each(sizes), each(sizes)
    padding = [p - 1 for p in padding]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    is_transposed = draw(st.booleans())
    extra = [0] * dims
    if is_transposed:
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        least = [2 * p + 2 - r for p, r in zip(padding, reach, strict=True)]
        size = [
            max(1, -(-n // s) + 1) + draw(st.integers(0, 4))
            for n, s in zip(least, stride, strict=True)
        ]
    else:
        size = [
            max(1, r - 2 * p) + draw(st.integers(0, 5)) for r, p in zip(reach, padding, strict=True)
        ]
    channels = (draw(sizes), draw(sizes))
    has_bias = draw(st.booleans())
    return (
        (draw(sizes), channels[0], *size),
        (*channels, *kernel) if is_transposed else (*reversed(channels), *kernel),
        (channels[1],) if has_bias else None,
        (stride, padding, dilation, is_transposed, extra, 1),
    )


def graphs_of(image, weight, bias, options):
    """The forward and backward of one layer, as graph modules with known shapes."""
    result = aten.convolution.default(image, weight, bias, *options)
    grad = torch.randn_like(result)
    sizes = None if bias is None else list(bias.shape)
    mask = [True, True, bias is not None]
    stride, padding, dilation, is_transposed, extra, groups = options
    rest = (sizes, stride, padding, dilation, is_transposed, extra, groups, mask)

    def build(target, values, make_arguments):
        graph = fx.Graph()
        holders = []
        for number, value in enumerate(values):
            holders.append(graph.placeholder(f"argument_{number}"))
            holders[-1].meta["val"] = value
        node = graph.call_function(target, make_arguments(*holders))
        node.meta["val"] = target(*make_arguments(*values))
        results = [node]
        if isinstance(node.meta["val"], tuple):
            results = []
            for i, value in enumerate(node.meta["val"]):
                if value is not None:
                    results.append(graph.call_function(operator.getitem, (node, i)))
                    results[-1].meta["val"] = value
        graph.output(tuple(results))
        return fx.GraphModule(torch.nn.Module(), graph), values

    leaves = (image, weight) if bias is None else (image, weight, bias)
    forward = build(aten.convolution.default, leaves, lambda x, w, b=None: (x, w, b, *options))
    backward = build(
        aten.convolution_backward.default, (grad, image, weight), lambda *a: (*a, *rest)
    )
    return forward, backward


def random_layer(image, weight, bias, options, dtype=torch.float32):
    torch.manual_seed(0)
    values = [None if s is None else torch.randn(s, dtype=dtype) for s in (image, weight, bias)]
    return graphs_of(*values, options)


def targets_of(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


OPERATORS = (aten.convolution.default, aten.convolution_backward.default)


# A tap that meets padding only.
TAP_OUTSIDE = ((1, 1, 1, 1), (1, 1, 1, 3), None, ([2, 1], [0, 2], [1, 2], False, [0, 0], 1))
# Kernel and stride tile the image but for its last pixel; the same by output padding.
PIXEL_LEFT = ((1, 1, 3), (1, 1, 2), None, ([2], [0], [1], False, [0], 1))
PIXEL_ADDED = ((1, 1, 3), (1, 1, 2), (1,), ([2], [0], [1], True, [1], 1))


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(layers())
@example(TAP_OUTSIDE)
@example(PIXEL_LEFT)
@example(PIXEL_ADDED)
def test_products_are_convolutions(layer):
    for module, arguments in random_layer(*layer):
        expected = module(*arguments)
        expand_convolutions(module)
        assert not any(target in OPERATORS for target in targets_of(module.graph))
        for actual, value in zip(module(*arguments), expected, strict=True):
            assert actual.shape == value.shape
            # Sums of up to thousands of values around 1, in another order.
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-3)


PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0])
LEFT = {
    "groups": (((2, 4, 5, 5), (6, 2, 3, 3), None, (*PLAIN, 2)), torch.float32),
    "dtype": (((2, 4, 5, 5), (6, 4, 3, 3), (6,), (*PLAIN, 1)), torch.float64),
    "columns": (((1, 80, 80, 80), (80, 80, 3, 3), None, (*PLAIN, 1)), torch.float32),
    "weight": (((1, 1025, 1, 1), (1024, 1025, 1, 1), None, (*PLAIN, 1)), torch.float32),
    "empty": (((0, 4, 5, 5), (6, 4, 3, 3), None, (*PLAIN, 1)), torch.float32),
}


@pytest.mark.unit
@pytest.mark.parametrize("reason", LEFT)
def test_what_products_do_not_take_stays(reason):
    layer, dtype = LEFT[reason]
    forward, backward = random_layer(*layer, dtype=dtype)
    for (module, _), kept in zip((forward, backward), OPERATORS, strict=True):
        before = str(module.graph)
        expand_convolutions(module)
        assert str(module.graph) == before
        assert targets_of(module.graph)[0] is kept


@pytest.mark.unit
def test_columns_are_made_of_the_image_with_fewer_channels(monkeypatch):
    sizes = []
    columns = convolution._columns
    monkeypatch.setattr(
        convolution, "_columns", lambda *a: sizes.append(columns(*a).shape) or columns(*a)
    )
    window = Window([1, 1], [1, 1], [1, 1])
    few, many, size = torch.randn(2, 3, 8, 8), torch.randn(2, 6, 8, 8), [8, 8]
    weight, turned = torch.randn(6, 3, 3, 3), torch.randn(3, 6, 3, 3)
    contract(few, weight, None, window, size)
    contract(many, turned, None, window, size)  # adds up its product instead
    spread(few, turned, None, window, size)
    spread(many, weight, None, window, size)
    weight_gradient(few, many, [3, 3], window)
    weight_gradient(many, few, [3, 3], window)
    assert sizes == [(27, 128)] * 4


@pytest.mark.unit
def test_one_number_may_stand_for_all_dimensions():
    options = ([2], [1], [1], False, [0], 1)
    for module, arguments in random_layer((2, 3, 7, 6), (4, 3, 3, 3), (4,), options):
        expected = module(*arguments)
        expand_convolutions(module)
        for actual, value in zip(module(*arguments), expected, strict=True):
            # Sums of hundreds of values around 1, in another order.
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-4)


def operators_of_stage(is_host):
    from mpxla.config import Config
    from mpxla.graph.capture.recorder import current_recorder
    from mpxla.graph.capture.step import ToCapture, capture_step
    from mpxla.runtime.plans.cut import cut_step
    from mpxla.stage.lower import TracedStage

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.GELU(), torch.nn.ConvTranspose2d(4, 3, 2)
    )
    objects = {name: name for name in dict(model.named_parameters())}

    def step(leaves):
        loss = model(*leaves).square().mean()
        current_recorder().backward(loss, None)
        return loss

    graph = capture_step(ToCapture(step, model, [torch.zeros(2, 3, 8, 8)], objects))
    (stage,) = cut_step(graph, Config(), make_lowering(True), {}, None).stages
    found = []
    for is_training in (True, False):
        lowered = TracedStage(stage, is_training, make_lowering(is_host)).lowered()
        graphs = [lowered.forward.graph]
        if is_training:
            graphs.append(lowered.backward.derivative.graph)
        for part in graphs:
            found.append([str(o) for o in targets_of(part) if o in OPERATORS])
    return found


@pytest.mark.ranks
def test_other_devices_keep_their_convolutions():
    forward, backward = ["aten.convolution.default"] * 2, ["aten.convolution_backward.default"] * 2
    assert run_ranks(operators_of_stage, 1, False) == [[forward, backward, forward]]


@pytest.mark.ranks
def test_stages_on_the_processor_have_products():
    assert run_ranks(operators_of_stage, 1, True) == [[[], [], []]]
