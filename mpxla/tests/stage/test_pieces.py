"""Cutting graphs into pieces: pure, without a device."""

import operator
from dataclasses import dataclass

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.stage.pieces import (
    ComputePiece,
    HostPiece,
    Piece,
    PieceList,
    annotate,
    split_graph,
)
from mpxla.stage.spec import TensorSpec

pytestmark = pytest.mark.unit

aten = torch.ops.aten
SQUARE = TensorSpec((4, 4), torch.float32)
ON_HOST = {aten.linalg_cholesky_ex.default, aten.median.dim, aten.digamma.default}


def kind_of(node: fx.Node) -> type[Piece]:
    return HostPiece if node.target in ON_HOST else ComputePiece


def traced(function, num_inputs=1):
    return make_fx(function)(*(torch.rand(4, 4) for _ in range(num_inputs)))


def run(plan: PieceList, *arguments):
    """As the runner does, with values dropped after their last use."""
    values = [*arguments, *[None] * (plan.num_values - plan.num_arguments)]
    for piece, done in zip(plan.pieces, plan.last_uses(), strict=True):
        results = piece.module(*(values[n] for n in piece.inputs))
        for number, value, spec in zip(piece.outputs, results, piece.output_specs, strict=True):
            assert TensorSpec.of(value) == spec
            values[number] = value
        for number in done:
            values[number] = None
    assert [i for i, v in enumerate(values) if v is not None and i >= plan.num_arguments] == sorted(
        {n for n in plan.results if n >= plan.num_arguments}
    )
    return [values[n] for n in plan.results]


def kinds(plan: PieceList) -> str:
    return "".join("H" if isinstance(piece, HostPiece) else "C" for piece in plan.pieces)


def names(piece: Piece) -> list[str]:
    targets = [n.target for n in piece.module.graph.nodes if n.op == "call_function"]
    return [str(getattr(t, "_opname", t.__name__)) for t in targets]


def plain(x):
    return [aten.exp.default(x)]


def one(x):
    return [aten.mul.Tensor(aten.digamma.default(aten.exp.default(x)), x)]


def two_in_a_row(x):
    found = aten.digamma.default(aten.digamma.default(x))
    return [aten.add.Tensor(found, aten.exp.default(x)), found, x]


def independent(x):
    left = aten.digamma.default(aten.exp.default(x))
    right = aten.median.dim(aten.sin.default(x), 1)
    return [aten.add.Tensor(left, operator.getitem(right, 0)), operator.getitem(right, 1)]


def alternating(x):
    for _ in range(3):
        x = aten.digamma.default(aten.exp.default(x))
    return [aten.neg.default(x)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, "C"),
        (one, "CHC"),
        (two_in_a_row, "CHC"),
        (independent, "CHC"),
        (alternating, "CHCHCHC"),
    ],
)
def test_pieces_compute_what_the_graph_does(function, expected):
    plan = split_graph(traced(function), kind_of)
    assert kinds(plan) == expected
    x = torch.rand(4, 4)
    torch.testing.assert_close(run(plan, x), function(x))


def test_donated_arguments_go_to_the_last_piece_that_reads_them():
    def update(a, b, c, d):
        small = aten.sum.default(d)
        first = aten.digamma.default(aten.add.Tensor(aten.mul.Tensor(a, small), b))
        return [aten.add.Tensor(first, b), aten.add.Tensor(first, c), a]

    plan = split_graph(traced(update, 4), kind_of)
    assert kinds(plan) == "CHC"
    taken = [
        [piece.inputs[i] for i in positions]
        for piece, positions in zip(plan.pieces, plan.donated((0, 1, 2, 3)), strict=True)
    ]
    # What fails on the host has taken nothing, `a` is a result, and none is left for `d`.
    assert taken == [[], [], [1, 2]]
    assert plan.donated((2,))[-1] == (plan.pieces[-1].inputs.index(2),)


def test_work_that_is_ready_together_shares_a_piece():
    plan = split_graph(traced(independent), kind_of)
    first, host, last = plan.pieces
    assert sorted(names(first)) == ["exp", "sin"]
    assert sorted(names(host)) == ["digamma", "getitem", "getitem", "median"]
    assert names(last) == ["add"]


def test_only_what_others_read_leaves_a_piece():
    def function(x):
        kept = aten.exp.default(aten.sin.default(x))
        return [aten.digamma.default(kept)]

    plan = split_graph(traced(function), kind_of)
    assert [len(piece.outputs) for piece in plan.pieces] == [1, 1]
    assert plan.results == plan.pieces[1].outputs


def test_views_of_arguments_and_constants_are_made_where_they_are_read():
    def function(x, weight):
        turned = aten.t.default(weight)
        table = aten.arange.default(4)
        first = aten.digamma.default(aten.add.Tensor(aten.mm.default(x, turned), table))
        return [aten.add.Tensor(aten.mm.default(first, turned), table)]

    plan = split_graph(traced(function, 2), kind_of)
    first, _, last = plan.pieces
    assert len(first.outputs) == 1  # the product, and no copy of the weight
    assert last.inputs[0] == 1 and sorted(names(last)) == ["add", "arange", "mm", "t"]
    arguments = torch.rand(4, 4), torch.rand(4, 4)
    torch.testing.assert_close(run(plan, *arguments), function(*arguments))


def test_random_numbers_are_drawn_once():
    def function(x):
        noise = aten.rand.default([4, 4])
        return [aten.add.Tensor(aten.digamma.default(aten.mul.Tensor(x, noise)), noise)]

    plan = split_graph(traced(function), kind_of)
    assert [names(piece).count("rand") for piece in plan.pieces] == [1, 0, 0]


def test_result_of_another_piece_may_be_an_argument_too():
    plan = split_graph(traced(two_in_a_row), kind_of)
    assert plan.results[2] == 0


def test_dtypes_of_arguments_become_constants():
    def function(x):
        return [aten.digamma.default(x) + x.exp().to(x.dtype)]

    module = fx.symbolic_trace(function)
    annotate(module, [SQUARE])
    assert not any(node.target is getattr for node in module.graph.nodes)
    x = torch.rand(4, 4)
    torch.testing.assert_close(run(split_graph(module, kind_of), x), function(x))


def test_constants_of_the_graph_go_where_they_are_read():
    table = torch.arange(4.0)

    def function(x):
        return [aten.add.Tensor(aten.digamma.default(aten.add.Tensor(x, table)), table)]

    module = fx.symbolic_trace(function)
    annotate(module, [SQUARE])
    plan = split_graph(module, kind_of)
    assert [len(piece.inputs) for piece in plan.pieces] == [1, 1, 1]
    x = torch.rand(4, 4)
    torch.testing.assert_close(run(plan, x), function(x))


@dataclass(frozen=True)
class CollectivePiece(Piece):
    """A kind that this module does not know."""


def test_further_kinds_of_pieces_need_no_change_here():
    def chosen(node):
        return CollectivePiece if node.target is aten.sin.default else kind_of(node)

    plan = split_graph(traced(independent), chosen)
    found = [type(piece).__name__ for piece in plan.pieces]
    assert found == ["ComputePiece", "CollectivePiece", "HostPiece", "ComputePiece"]
    x = torch.rand(4, 4)
    torch.testing.assert_close(run(plan, x), independent(x))
