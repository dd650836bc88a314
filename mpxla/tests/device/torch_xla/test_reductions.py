"""Reductions of XLA's CPU backend: equal to PyTorch's, what is rewritten, and why."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.device.torch_xla.operators.reductions import expand_reductions, row_max, row_sum
from mpxla.tests.ranks.run import run_ranks

aten = torch.ops.aten
LENGTHS = [1, 31, 32, 33, 65, 96, 197, 384, 1000, 1024, 1025, 1056, 4096, 5000, 50257]


@pytest.mark.unit
@pytest.mark.parametrize("length", LENGTHS)
def test_rows(length):
    values = torch.rand(3, 2, length, generator=torch.Generator().manual_seed(length))
    expected = values.double().sum(-1, keepdim=True).float()
    # All summands are positive: every rounding error is at most one of the result.
    torch.testing.assert_close(row_sum(values), expected, rtol=1e-6, atol=0)
    assert torch.equal(row_max(values), values.amax(-1, keepdim=True))
    for place in {0, length // 2, length - 1}:
        marked = values.clone()
        marked[1, 1, place] = 7.0
        assert row_max(marked)[1, 1, 0] == 7
        marked[1, 1, place] = torch.nan
        assert row_max(marked).isnan().sum() == row_sum(marked).isnan().sum() == 1


def rewritten(function, *arguments):
    """The operators and functions of a rewritten graph, after a comparison of its values."""
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(a) for a in arguments]
    with mode:
        module = make_fx(function)(*fakes)
    expected = module(*arguments)
    expand_reductions(module)
    torch.testing.assert_close(module(*arguments), expected, rtol=1e-4, atol=1e-4)
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return [t.__name__ if not isinstance(t, torch._ops.OpOverload) else str(t) for t in targets]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: x.sum(-1), ["_sum_of_rows"]),
        (lambda x: x.sum(2, keepdim=True), ["_sum_of_rows"]),
        (lambda x: x.sum((-1, -2)), ["_sum_of_rows"]),
        (lambda x: x.sum((1, 2), keepdim=True), ["_sum_of_rows"]),
        (lambda x: x.mean(-1), ["_mean_of_rows"]),
        (lambda x: x.mean((2, 1), keepdim=True), ["_mean_of_rows"]),
        (lambda x: x.amax(-1, keepdim=True), ["_max_of_rows"]),
        (lambda x: x.sum((0, 1)), ["aten.sum.dim_IntList"]),
        (lambda x: x.sum((1, 0), keepdim=True), ["aten.sum.dim_IntList"]),
        (lambda x: x.sum(0), ["aten.sum.dim_IntList"]),
        (lambda x: x.softmax(-1), ["_softmax"]),
        (lambda x: x.log_softmax(2), ["_log_softmax"]),
        (lambda x: aten._safe_softmax(x, -1), ["_safe_softmax"]),
        (lambda x: aten._softmax_backward_data(x, x * 2, -1, x.dtype), ["_softmax_backward"]),
        (
            lambda x: aten._log_softmax_backward_data(x, x * 2, -1, x.dtype),
            ["_log_softmax_backward"],
        ),
        (lambda x: x.sum((0, 2)), ["aten.sum.dim_IntList"]),
        (lambda x: x.mean(0), ["aten.mean.dim"]),
        (lambda x: x.sum(1), ["aten.sum.dim_IntList"]),
        (lambda x: x[:, :, :32].sum(-1), ["aten.sum.dim_IntList"]),
        (lambda x: x[:32].sum(0), ["aten.sum.dim_IntList"]),
        (lambda x: x[:, :, :0].sum(-1), ["aten.sum.dim_IntList"]),
        (lambda x: x.sum((0, 1, 2)), ["aten.sum.dim_IntList"]),
        (lambda x: aten.sum.dim_IntList(x, None), ["aten.sum.dim_IntList"]),
        (lambda x: aten.sum.dim_IntList(x, []), ["aten.sum.dim_IntList"]),
        (lambda x: x.amax(), ["aten.amax.default"]),
        (lambda x: aten.sum.dim_IntList(x[0, 0, 0], [0]), ["aten.sum.dim_IntList"]),
        (lambda x: x[0, 0, 0].softmax(0), ["aten._softmax.default"]),
        (lambda x: x.double().sum(-1), ["aten.sum.dim_IntList"]),
        (lambda x: x.sum(-1, dtype=torch.float64), ["aten.sum.dim_IntList"]),
        (lambda x: (x > 0).sum(-1), ["aten.sum.dim_IntList"]),
        (lambda x: x.softmax(1), ["aten._softmax.default"]),
        (lambda x: x[:, :, :32].softmax(-1), ["aten._softmax.default"]),
        (lambda x: x.bfloat16().softmax(-1), ["aten._softmax.default"]),
    ],
)
def test_what_is_rewritten(function, names):
    values = torch.randn(40, 2, 60, generator=torch.Generator().manual_seed(0))
    kept = ("mul", "slice", "select", "_to_copy", "gt")
    found = rewritten(function, values)
    assert [n for n in found if n.split(".")[-2 if "." in n else 0] not in kept] == names


@pytest.mark.unit
def test_rows_without_any_score():
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    scores[1] = -torch.inf
    scores[2, 3:] = -torch.inf
    scores[3, 7] = torch.nan
    graph = fx.Graph()
    holder = graph.placeholder("scores")
    holder.meta["val"] = scores
    node = graph.call_function(aten._safe_softmax.default, (holder, -1))
    node.meta["val"] = scores
    graph.output(node)
    module = fx.GraphModule(torch.nn.Module(), graph)
    expand_reductions(module)
    found = module(scores)
    torch.testing.assert_close(found, aten._safe_softmax(scores, -1), equal_nan=True)
    assert not found[1].any()
    assert found[3].isnan().all()


# --- why -----------------------------------------------------------------------------------------


def kernels_of(kind, folder):
    """Kinds of kernels that XLA compiles for four equal operations in one program."""
    import pathlib
    import re
    from collections import Counter

    from torch.fx.experimental.proxy_tensor import make_fx

    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.stage.spec import TensorSpec

    shape = (8, 384)
    functions = {
        "rows": lambda x: (x * x).sum(-1, keepdim=True),
        "folded rows": lambda x: row_sum(x * x),
        "additions": lambda x: x + (x @ x.T) @ x,
        "additions with a factor": lambda x: x + (x @ x.T) @ x * ((x[0, 0] * 0 == 1).float() + 1),
    }
    function = functions[kind]

    def four(*arguments):
        return [function(x) for x in arguments]

    graph = make_fx(four)(*(torch.randn(shape) for _ in range(4)))
    compile_graph(kind, graph, [TensorSpec(shape, torch.float32)] * 4, current_device())
    files = [p.name for p in pathlib.Path(folder).glob("*obj-file*")]
    kinds = [
        re.sub(r"\.\d+", "", n.split("obj-file.")[1].removesuffix("_kernel_module.o"))
        for n in files
    ]
    return dict(Counter(kinds))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "most", "least"),
    [
        ("rows", 16, 8),
        ("folded rows", 3, 1),
        ("additions", 9, 4),
        ("additions with a factor", 4, 1),
    ],
)
def test_reason(kind, most, least, tmp_path):
    flags = f"--xla_cpu_use_xnnpack=false --xla_dump_to={tmp_path}"
    (kernels,) = run_ranks(kernels_of, 1, kind, str(tmp_path), env={"XLA_FLAGS": flags})
    assert least <= sum(kernels.values()) <= most, kernels
