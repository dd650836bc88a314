"""Collectives between the pieces of a program, over the transport of threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.comm.transport import Members
from mpxla.errors import LoweringError, PeerFailure
from mpxla.graph.collectives import is_collective
from mpxla.stage.collective import CollectiveRunner
from mpxla.stage.pieces import CollectivePiece, ComputePiece, annotate, split_graph
from mpxla.stage.spec import TensorSpec
from mpxla.tests.comm.threads import threads_world

pytestmark = pytest.mark.unit

c10d = torch.ops._c10d_functional
SQUARE = TensorSpec((4, 4), torch.float32)
WAIT = c10d.wait_tensor.default


def kind_of(node):
    return CollectivePiece if is_collective(node) else ComputePiece


def plan_of(function, num_inputs=1):
    """Cut as backends do; traced without values, since PyTorch would look for a process group."""
    inputs = [torch.empty(4, 4, device="meta") for _ in range(num_inputs)]
    module = make_fx(function)(*inputs)
    annotate(module, [SQUARE] * num_inputs)
    return split_graph(module, kind_of)


def runners_of(piece, size):
    ranks = tuple(range(size))
    worlds = threads_world(size)
    groups = [{"group": Members(ranks, transport)} for transport in worlds]
    return [
        CollectiveRunner("stage 1 forward, piece 2 of 3", piece, known, torch.Tensor.detach, list)
        for known in groups
    ], worlds


def run(function, values):
    """What every rank gets of a program that is one collective piece."""
    (piece,) = plan_of(function).pieces
    assert isinstance(piece, CollectivePiece)
    runners, _ = runners_of(piece, len(values))
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(lambda r, v: r([v])[0], runners, values, timeout=60))


VALUES = [torch.arange(16.0).view(4, 4), torch.arange(16.0, 32.0).view(4, 4).flip(0)]
BOTH = torch.stack(VALUES)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: c10d.all_reduce(x, "sum", "group"), [BOTH.sum(0)] * 2),
        (lambda x: c10d.all_reduce(x, "avg", "group"), [BOTH.mean(0)] * 2),
        (lambda x: c10d.all_reduce(x, "max", "group"), [BOTH.amax(0)] * 2),
        (lambda x: c10d.all_reduce(x, "min", "group"), [BOTH.amin(0)] * 2),
        (lambda x: c10d.all_gather_into_tensor(x, 2, "group"), [BOTH.flatten(0, 1)] * 2),
        (
            lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, "group"),
            list(BOTH.sum(0).split(2)),
        ),
        (
            lambda x: c10d.all_to_all_single(x, [2, 2], [2, 2], "group"),
            [torch.cat([v[:2] for v in VALUES]), torch.cat([v[2:] for v in VALUES])],
        ),
    ],
    ids=["sum", "avg", "max", "min", "gather", "scatter", "all-to-all"],
)
def test_every_collective(function, expected):
    found = run(lambda x: [WAIT(function(x))], VALUES)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_one_after_the_other_and_side_by_side():
    def function(x):
        first = WAIT(c10d.all_reduce(x, "sum", "group"))
        second = WAIT(c10d.all_reduce(x, "max", "group"))
        again = WAIT(c10d.all_reduce(first, "sum", "group"))
        return [again, second, first]

    (piece,) = plan_of(function).pieces
    runners, _ = runners_of(piece, 2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda r, v: r([v]), runners, VALUES, timeout=60))
    for again, second, first in found:  # a piece gives results in the program's order
        assert torch.equal(first, BOTH.sum(0))
        assert torch.equal(again, 2 * BOTH.sum(0))
        assert torch.equal(second, BOTH.amax(0))


def test_pieces_alternate():
    def function(x):
        first = WAIT(c10d.all_reduce(torch.sin(x), "sum", "group"))
        return [torch.exp(first), WAIT(c10d.all_reduce(torch.cos(x), "sum", "group"))]

    plan = plan_of(function)
    kinds = [type(piece) for piece in plan.pieces]
    assert kinds == [ComputePiece, CollectivePiece, ComputePiece]


def test_errors_name_program_and_operator():
    (piece,) = plan_of(lambda x: [WAIT(c10d.all_reduce(x, "sum", "other"))]).pieces
    with pytest.raises(LoweringError, match=r"stage 1 forward.* group 'other', which this program"):
        runners_of(piece, 2)
    (piece,) = plan_of(lambda x: [WAIT(c10d.broadcast(x, 0, "group"))]).pieces
    with pytest.raises(LoweringError, match=r"broadcast .* cannot run between programs"):
        runners_of(piece, 2)
    (piece,) = plan_of(lambda x: [WAIT(c10d.all_reduce(x, "product", "group"))]).pieces
    runners, _ = runners_of(piece, 2)
    with pytest.raises(LoweringError, match="'product' is not among"):
        runners[0]([VALUES[0]])


def test_a_peer_that_fails_ends_the_wait():
    (piece,) = plan_of(lambda x: [WAIT(c10d.all_reduce(x, "sum", "group"))]).pieces
    runners, worlds = runners_of(piece, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runners[0], [VALUES[0]])
        worlds[1].watch.report("its own work", ValueError("broken"))
        with pytest.raises(PeerFailure, match="rank 1") as caught:
            waiting.result(timeout=60)
    assert "stage 1 forward, piece 2 of 3" in str(caught.value.__notes__)
