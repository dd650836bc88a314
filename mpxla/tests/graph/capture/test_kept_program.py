"""The functional graph of an earlier start: the same one, and for the same trace only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpxla.graph.capture import step as capture
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.fingerprint import fingerprint, layouts
from mpxla.graph.regions import region_of
from mpxla.graph.stepgraph import describe, module_path
from mpxla.kept import Kept, open_kept
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit


class Model(nn.Module):
    """Regions of all kinds, state that changes, a constant and random numbers."""

    def __init__(self, rate=0.5, constant=2.0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.dropout, self.constant = nn.Dropout(rate), constant

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
        x = self.norm(x.float()) * torch.tensor([self.constant, 1, 1, 1, 1, 1])
        with torch.no_grad():
            scale = x.abs().amax()
        x = checkpoint(lambda v: self.dropout(v.tanh()), x / scale, use_reentrant=False)
        x[:, 0] = 0.0
        return self.last(x)


def captured(kept, model=None, power=2, trains=True):
    model = model or Model()

    def step(leaves):
        (x,) = leaves
        loss = F.layer_norm(model(x), [3]).pow(power).sum()
        if trains:
            current_recorder().backward(loss)
        return loss, {"x": x.mT if trains else 7}

    names = ModelState(model).canonical_names
    return capture_step(
        ToCapture(step, model, [TensorLeaf((5, 4), torch.float32)], names, kept=kept)
    )


@pytest.fixture
def kept(tmp_path):
    return open_kept(str(tmp_path), "cpu-1")


def rows(step):
    """All that functions of graphs go by."""
    nodes = list(step.graph.nodes)
    regions = [region_of(node) for node in nodes]
    return fingerprint(step.graph, metas=("val",)).splitlines(), [
        (
            node.name,
            describe(node),
            module_path(node),
            layouts(node.meta.get("val")),
            None if region is None else regions.index(region),
        )
        for node, region in zip(nodes, regions, strict=True)
    ]


def refuse(*_):
    raise AssertionError("an earlier start has made that graph")


def test_an_earlier_starts_graph(kept, monkeypatch):
    plain, before = captured(Kept()), captured(kept)
    monkeypatch.setattr(capture, "functionalize", refuse)
    monkeypatch.setattr(capture, "functional_step", refuse)
    after = captured(kept)
    assert after.graph is not before.graph
    for step in (before, after):
        assert rows(step) == rows(plain)
        assert (step.inputs, step.outputs) == (plain.inputs, plain.outputs)
        assert step.constants.keys() == plain.constants.keys() != set()
        for name, value in plain.constants.items():
            assert torch.equal(step.constants[name], value)
    assert any(region_of(node) for node in after.graph.nodes)
    kinds = {type(node.meta["val"]) for node in after.graph.find_nodes(op="placeholder")}
    assert len(kinds) == 1 and len({n.meta["val"].fake_mode for n in after.placeholders}) == 1


def frozen():
    model = Model()
    model.first.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda kept: captured(kept, power=3), id="function"),
        pytest.param(
            lambda kept: captured(kept, trains=False), id="evaluation", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda kept: captured(kept, Model(rate=0.1)), id="number", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda kept: captured(kept, Model(constant=3.0)), id="constant", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda kept: captured(kept, Model().eval()), id="mode", marks=pytest.mark.slow
        ),
        pytest.param(lambda kept: captured(kept, frozen()), id="frozen", marks=pytest.mark.slow),
        pytest.param(lambda kept: captured(kept, Model().double()), id="dtype"),
    ],
)
def test_another_trace_finds_nothing(kept, other):
    captured(kept)
    found = kept.num_found
    step = other(kept)
    assert kept.num_found == found
    assert rows(step) == rows(other(Kept()))


def test_regions_of_the_caller_count(kept):
    captured(kept)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = captured(kept)
        assert kept.num_found == 0
        assert rows(step) == rows(captured(Kept()))


def test_what_cannot_be_read_is_made_anew(kept, caplog, monkeypatch):
    before = captured(kept)
    monkeypatch.setattr(Kept, "get", lambda kept, key: b"of another version")
    assert rows(captured(kept)) == rows(before)
    assert "what an earlier start has kept cannot be read, and is made anew" in caplog.text


def test_code_of_the_user_is_not_kept(kept, caplog):
    """A policy of selective checkpointing may be another one under the same name."""
    model = nn.Linear(4, 4)

    def policy(context, operator, *args, **kwargs):
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def step(leaves):
        def contexts():
            make = torch.utils.checkpoint.create_selective_checkpoint_contexts
            return make(policy)

        value = checkpoint(model, leaves[0], use_reentrant=False, context_fn=contexts)
        current_recorder().backward(value.sum())
        return value

    names = ModelState(model).canonical_names
    for _ in range(2):
        capture_step(ToCapture(step, model, [TensorLeaf((5, 4), torch.float32)], names, kept=kept))
    assert (kept.num_found, kept.num_added) == (0, 0)


def test_steps_under_vmap_are_not_kept(kept):
    """Values of their graphs have no bytes to hash."""
    model = nn.Linear(4, 4)
    names, leaves = ModelState(model).canonical_names, [TensorLeaf((5, 4), torch.float32)]

    def step(leaves):
        return torch.vmap(lambda row: model(row).tanh())(leaves[0])

    found, plain = (
        capture_step(ToCapture(step, model, leaves, names, kept=k)) for k in (kept, Kept())
    )
    assert (kept.num_found, kept.num_added) == (0, 0)
    assert rows(found) == rows(plain)
