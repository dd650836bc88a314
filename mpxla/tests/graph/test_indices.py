"""Ranges of indices in a captured step are those that PyTorch checks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.graph import indices
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.indices import find_index_uses, indices_of_inputs, with_extremes
from mpxla.graph.stepgraph import OutputKind
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

LONG = TensorLeaf((2, 3), torch.int64)
TABLE = torch.arange(20.0).reshape(5, 4)
SCORES = TABLE[:, :3].log_softmax(1)
LABELS = TensorLeaf((5,), torch.int64)

OPERATORS = {
    "embedding": (LONG, lambda i: F.embedding(i, TABLE, padding_idx=1)),
    "embedding_bag": (LONG, lambda i: F.embedding_bag(i, TABLE, mode="sum")),
    "index_select": (LONG, lambda i: TABLE.index_select(1, i[0])),
    "gather": (LONG, lambda i: TABLE.gather(1, i)),
    "take": (LONG, lambda i: TABLE.take(i)),
    "take_along_dim": (LONG, lambda i: torch.take_along_dim(TABLE, i[:, 2:], 0)),
    "brackets": (LONG, lambda i: TABLE[:, i]),
    "brackets of a mask too": (LONG, lambda i: TABLE[i, torch.tensor([[0], [1]])]),
    "assignment": (LONG, lambda i: TABLE.index_put((i,), torch.zeros(()))),
    "scatter": (LONG, lambda i: TABLE.scatter(1, i, 0.0)),
    "scatter_add": (LONG, lambda i: TABLE.scatter_add(0, i, torch.ones(2, 3))),
    "index_add": (LONG, lambda i: TABLE.index_add(0, i[0], torch.ones(3, 4))),
    "index_copy": (LONG, lambda i: TABLE.index_copy(0, i[0], torch.ones(3, 4))),
    "one_hot": (LONG, lambda i: F.one_hot(i, 4)),
    "cross_entropy": (LABELS, lambda i: F.cross_entropy(SCORES, i)),
    "cross_entropy of pixels": (LONG, lambda i: F.cross_entropy(TABLE.expand(2, 5, 4)[..., :3], i)),
    "cross_entropy ignoring": (LABELS, lambda i: F.cross_entropy(SCORES, i, ignore_index=-1)),
    "cross_entropy smoothed": (LABELS, lambda i: F.cross_entropy(SCORES, i, label_smoothing=0.1)),
    "nll_loss": (LABELS, lambda i: F.nll_loss(SCORES, i, ignore_index=1)),
    "NLLLoss by keywords": (LABELS, lambda i: nn.NLLLoss(ignore_index=7)(SCORES, target=i)),
    "views and shifts": (LONG, lambda i: F.embedding(i[:, 1:].flatten().int().clamp(min=0), TABLE)),
}  # fmt: skip
if indices._WRAPS_ALONG_DIM:
    del OPERATORS["take_along_dim"]


def capture_all():
    """One step that runs every operator on an input of its own."""
    model = nn.Identity()
    functions = [function for _, function in OPERATORS.values()]
    return capture_step(
        ToCapture(
            lambda given: [function(x) for function, x in zip(functions, given, strict=True)],
            model,
            [leaf for leaf, _ in OPERATORS.values()],
            ModelState(model).canonical_names,
        )
    )


def complaint(step, tensors):
    for check in indices_of_inputs(step):
        found = check.problem([[tensors[leaf] for leaf in check.leaves]])
        if found is not None:
            return check.leaves[0], found[1]
    return None


def refuses(function, values):
    try:
        function(values)
    except (IndexError, RuntimeError):
        return True
    return False


def test_what_pytorch_refuses_is_refused():
    checks = {check.leaves: check for check in indices_of_inputs(capture_all())}
    for place, (name, (leaf, function)) in enumerate(OPERATORS.items()):
        outcomes = set()
        for value in (-101, -100, -21, -20, -6, -5, -4, -3, -1, 0, 1, 2, 3, 4, 5, 7, 19, 20):
            values = torch.zeros(leaf.shape, dtype=torch.int64)
            values.view(-1)[-1] = value
            values[(0, -1) if leaf.shape == (2, 3) else -1] = value
            expected = refuses(function, values)
            found = checks[place,].problem([[torch.zeros_like(values)], [values]])
            assert (found is not None) == expected, (name, value, found)
            zero_is_right = not refuses(function, torch.zeros_like(values))
            assert found is None or found[0] == zero_is_right, "the microbatch"
            assert found is None or f"index {value}, and aten." in found[1]
            outcomes.add(expected)
        assert outcomes == {True, False}, f"the values tell nothing about {name}"


def test_text_names_operator_module_line_and_range():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, ids):
            return self.table(ids)

    model = Net()

    def loss(given):
        return F.cross_entropy(model(given[1]), given[0], ignore_index=-1)

    leaves = [TensorLeaf((3,), torch.int64)] * 2
    step = capture_step(ToCapture(loss, model, leaves, ModelState(model).canonical_names))
    good = torch.tensor([0, 3, -1])
    leaf, text = complaint(step, [good, torch.tensor([0, 7, 1])])
    assert leaf == 1
    assert "index 7, and aten.embedding in model.table at " in text
    assert "test_indices.py:" in text and ": return self.table(ids) takes indices from 0" in text
    assert text.endswith(" from 0 to 4")
    leaf, text = complaint(step, [torch.tensor([0, -2, -1]), torch.tensor([0, 4, 1])])
    assert leaf == 0
    assert "index -2, and aten.cross_entropy_loss in the step function at " in text
    assert text.endswith("from 0 to 3, or -1 (ignore_index)")
    assert complaint(step, [good, torch.tensor([0, 4, 1])]) is None


def test_values_of_parameters_floats_and_masks_are_left_to_the_programs():
    table = nn.Parameter(TABLE.clone())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table
            self.register_buffer("positions", torch.arange(3))

        def forward(self, x, mask):
            best = self.table[x.argmax(dim=1)] + self.table[self.positions][0]
            return best + self.table[mask.long().sum(1)]

    model = Net()
    leaves = [TensorLeaf((2, 9), torch.float32), TensorLeaf((2, 9), torch.bool)]
    names = ModelState(model).canonical_names
    step = capture_step(ToCapture(lambda given: model(*given), model, leaves, names))
    assert len(find_index_uses(step)) == 3
    (check,) = indices_of_inputs(step)
    assert check.leaves == (1,)
    assert check.problem([[torch.ones(2, 9, dtype=torch.bool)]]) is not None
    before = len(step.outputs)
    more = with_extremes(step)
    assert len(more.outputs) == before + 3
    assert [r.index for r in more.outputs if r.kind is OutputKind.RESULT] == [0, 1, 2, 3]
    values = {"table": TABLE, "positions": model.positions}
    x, mask = torch.zeros(2, 9), torch.ones(2, 9, dtype=torch.bool)
    x[0, 3], x[1, 2] = 1, 1
    mask[:, 3:] = False
    given = [values.get(r.name) if r.name else (x, mask)[r.index] for r in more.inputs]
    found = torch.fx.GraphModule(nn.Module(), more.graph)(*given)[-3:]
    assert [tuple(f.tolist()) for f in found] == [(2, 3), (0, 2), (3, 3)]
