"""Texts of graphs: equal for the same computation, different or none for every other."""

import functools

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.graph.fingerprint import UnknownValueError, described, fingerprint, torch_settings
from mpxla.graph.regions import Region, tag
from mpxla.graph.split import copy_nodes

pytestmark = pytest.mark.unit

X = torch.ones(2, 3)


def text_of(function, *inputs, metas=("val",)):
    module = make_fx(function)(*(inputs or (X,)))
    for node in module.graph.nodes:  # as lowering leaves it
        if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = torch.empty(
                node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta"
            )
    return fingerprint(module.graph, module, metas)


DIFFERENT = {
    "another operator": lambda x: [x - 2.0],
    "another number": lambda x: [x + 2.0000000000000004],
    "a number of another type": lambda x: [x + 2],
    "a boolean": lambda x: [x + True],
    "another order of arguments": lambda x: [2.0 + x.t().t()],
    "a result more": lambda x: [x + 2.0, x],
    "another keyword": lambda x: [torch.add(x, 2.0, alpha=3)],
    "a constant": lambda x: [x + torch.tensor(2.0)],
    "another constant": lambda x: [x + torch.tensor(3.0)],
    "a constant of another type": lambda x: [x + torch.tensor(2.0, dtype=torch.float64)],
}


def test_equal_graphs_have_equal_texts():
    def named(value):
        other = value + 2.0
        return [other]

    assert text_of(lambda x: [x + 2.0]) == text_of(named)


def test_different_graphs_have_different_texts():
    texts = {"the graph": text_of(lambda x: [x + 2.0])}
    texts |= {name: text_of(function) for name, function in DIFFERENT.items()}
    for shape, dtype in (
        ((3, 2), torch.float32),
        ((2, 3), torch.float64),
        ((2, 3, 1), torch.float32),
    ):
        texts[f"{shape} {dtype}"] = text_of(lambda x: [x + 2.0], torch.ones(shape, dtype=dtype))
    twice = {text for text in texts.values() if list(texts.values()).count(text) > 1}
    assert not twice, [name for name, text in texts.items() if text in twice]


def test_which_node_is_read_counts():
    def one(x, y):
        return [(x + 1.0) * y, x]

    def other(x, y):
        return [(x + 1.0) * x, y]

    assert text_of(one, X, X + 1) != text_of(other, X, X + 1)


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", None, (1,), [1], slice(1), 1 + 0j),
        (0.0, -0.0, float("nan"), float("inf")),
        (torch.float32, torch.strided, torch.device("cpu"), torch.preserve_format, "torch.float32"),
        ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}),
        (X, X + 1, X.double(), torch.ones(3, 2), torch.ones(6)),
        (
            torch.nn.functional.relu,
            torch.relu,
            torch.ops.aten.relu.default,
            copy_nodes,
            torch.Tensor,
        ),
        (functools.partial(copy_nodes, 1), functools.partial(copy_nodes, 2)),
    ],
    ids=["numbers", "floats", "torchs", "mappings", "tensors", "functions", "partials"],
)
def test_values_are_told_apart(values):
    texts = [described(value) for value in values]
    assert len(set(texts)) == len(texts), texts


def test_settings_of_torch_are_told_apart():
    before = torch_settings()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch_settings() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch_settings() == before


def of_the_user(x):
    return x


@pytest.mark.parametrize(
    "value",
    [
        of_the_user,
        lambda: 1,
        object(),
        functools.partial(of_the_user),
        (1, of_the_user),
        type("A", (), {}),
    ],
    ids=["function", "lambda", "object", "partial", "in a tuple", "class"],
)
def test_what_may_mean_something_else_has_no_text(value):
    with pytest.raises(UnknownValueError):
        described(value)


def test_a_graph_that_calls_the_users_code_has_no_text():
    graph = fx.Graph()
    graph.output((graph.call_function(of_the_user, (graph.placeholder("x"),)),))
    with pytest.raises(UnknownValueError):
        fingerprint(graph)


def test_an_operator_of_the_user_has_no_text():
    with torch.library._scoped_library("mpxla_test_users", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        with pytest.raises(UnknownValueError):
            described(torch.ops.mpxla_test_users.double.default)


def test_regions_are_told_apart_by_themselves():
    """Two runs of a checkpointed module look alike, and are not one."""

    def text(*regions):
        graph = fx.Graph()
        value = graph.placeholder("x")
        for region in regions:
            value = graph.call_function(torch.ops.aten.relu.default, (value,))
            tag([value], region)
        graph.output((value,))
        return fingerprint(graph, metas=("custom",))

    one, two = Region("block"), Region("block")
    assert text(one, one) == text(two, two) != text(one, two)
    assert text(one, two, one) != text(one, two, two)
