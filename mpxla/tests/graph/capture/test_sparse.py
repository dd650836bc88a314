"""Sparse matrices in a step function: the numbers of plain PyTorch, without sparse operators."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from mpxla.errors import CaptureError
from mpxla.tests.graph.chosen.test_chosen import LABELS, capture, captured, numbers, plain

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse ")]

EDGES = torch.tensor([[0, 1, 1, 2, 2, 0], [2, 1, 0, 0, 2, 1]])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch checks no indices, and calls rows a beta
    ADJACENCY = torch.sparse_coo_tensor(EDGES, torch.arange(1.0, 7), (3, 3)).coalesce()
    TWICE = torch.sparse_coo_tensor(EDGES.repeat(1, 2), torch.arange(12.0), (3, 3))
    ROWS = ADJACENCY.to_sparse_csr()


def constants(m, h, y):
    x = h[:, 0]
    h1 = torch.sparse.mm(ADJACENCY, x).relu()
    return (
        m.head(torch.spmm(ROWS, h1)).square().mean()
        + (ADJACENCY @ x[:, 0]).sum()
        + (TWICE.t() @ x + torch.mm(TWICE.coalesce() * 0.5, x)).cos().sum()
        + (x.t() @ ADJACENCY).sin().sum()
        + torch.sparse.addmm(x, ROWS, x, beta=0.5, alpha=2).sum()
        + (ADJACENCY.to_dense() + ADJACENCY).matmul(x).mean()
        + ADJACENCY.coalesce().values().sum() * h.mean() * ADJACENCY.size(0)
    )


def made_inside(m, h, y):
    x = h[:, 0]
    scores = (x[EDGES[0]] * x[EDGES[1]]).sum(1)
    graph = torch.sparse_coo_tensor(EDGES, scores.exp(), (3, 3))
    degree = torch.sparse.sum(graph, dim=1).to_dense()
    by_rows = torch.sparse_csr_tensor(torch.tensor([0, 2, 2, 3]), EDGES[0, :3], scores[:3], (3, 3))
    eye = torch.eye(3).to_sparse()
    return (
        m.head(torch.sparse.mm(graph, x) / degree[:, None]).square().mean()
        + (by_rows @ x).sum()
        + (eye @ x).cos().sum()
        + torch.sparse.mm((x @ x.t()).relu().to_sparse(), x).mean()
        + torch.sparse.sum(graph).log()
    )


def added_in_place(m, h, y):
    """To dense ones, as adapters with few elements are added to weights."""
    x, scores = h[:, 0], h[0, 0, :6] * 2
    weight = (x @ x.t()).tanh().clone()
    weight += torch.sparse_coo_tensor(EDGES, scores, (3, 3))
    weight.add_(ADJACENCY, alpha=0.5)
    return (weight @ m.first(x)).square().mean()


def products_of_two(m, h, y):
    """Of two matrices that are sparse, as poolings of graphs make them."""
    x, scores = h[:, 0], h[0, 0, :6] * 2
    ends = torch.tensor([0, 2, 4, 6])
    others = torch.tensor([1, 2, 0, 1, 1, 2])
    rows = torch.sparse_csr_tensor(
        crow_indices=ends, col_indices=others, values=scores, size=(3, 3)
    )
    columns = torch.sparse_csc_tensor(ends, others, scores.sin(), size=(3, 3))
    twice = (ROWS @ ROWS).to_sparse_coo()
    mixed = torch.sparse.mm(ADJACENCY, TWICE)
    return (
        (twice @ m.first(x)).square().mean()
        + (mixed @ x).sum()
        + (columns @ x + rows @ x).square().sum()
        + twice.values().sin().sum() * (1 + twice.indices()[1].sum())
    )


@pytest.mark.parametrize(
    "function",
    [constants, added_in_place, products_of_two, pytest.param(made_inside, marks=pytest.mark.slow)],
    ids=lambda f: f.__name__,
)
def test_values_and_gradients(function):
    model, step, known = capture(function)
    assert known is None
    given = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
    expected = numbers(model, plain(function, model), given)
    found = numbers(model, captured(model, step), given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_constants_are_the_users_own_memory():
    _, step, _ = capture(lambda m, h, y: (ADJACENCY @ h[:, 0]).sum() + (ROWS @ h[:, 0]).sum())
    held = {value.data_ptr() for value in step.constants.values()}
    assert {ADJACENCY.values().data_ptr(), ROWS.values().data_ptr()} <= held


REFUSED = {
    "A product with anything but a dense vector": lambda m, h, y: ADJACENCY @ h,
    r"_sparse_softmax\(\) is not known": lambda m, h, y: torch.sparse.softmax(ADJACENCY, 1),
    "returns a sparse tensor": lambda m, h, y: ADJACENCY,
    "without a size": lambda m, h, y: torch.sparse_coo_tensor(EDGES, h[0, 0, :6]) @ h[:, 0],
    "the shapes do not fit": lambda m, h, y: ADJACENCY @ h[0],
    r"exp\(\) is not known": lambda m, h, y: torch.exp(TWICE) @ F.relu(h[:, 0]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_says_what_to_do(text):
    with pytest.raises(CaptureError, match=text) as error:
        capture(REFUSED[text])
    assert "to_dense()" in str(error.value) or "test_sparse.py" in str(error.value)
