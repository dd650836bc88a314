"""What starts find out about a step once: found again for the same step only, and equal."""

import pytest
import torch
from torch import nn

from mpxla.cli.factory import capture_factory
from mpxla.config import Config
from mpxla.graph.stepgraph import describe
from mpxla.kept import Kept, open_kept
from mpxla.runtime.plans.activations import plan_stages
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.kept_steps import KeptSteps
from mpxla.runtime.plans.scheduling import schedule_step
from mpxla.runtime.saved import saved_tensors
from mpxla.stage.spec import TensorSpec
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit


class Model(nn.Module):
    """Two products and a loss."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def captured(width=8, power=2):
    def step(model, x):
        loss = model(x).pow(power).sum()
        model.backward(loss)
        return loss

    return capture_factory(Model(width), (torch.ones(6, 4),), step)


@pytest.fixture
def kept(tmp_path):
    return KeptSteps(open_kept(str(tmp_path), "cpu-1"), NullBackend())


def refuse():
    raise AssertionError("an earlier start has found that out")


def test_saved_tensors(kept, monkeypatch):
    saved = kept.saved(captured())
    assert saved == saved_tensors(captured(), NullBackend().lowering)
    monkeypatch.setattr("mpxla.runtime.plans.kept_steps.saved_tensors", lambda *_: refuse())
    assert kept.saved(captured()) == saved
    with pytest.raises(AssertionError):
        kept.saved(captured(width=9))


def test_decisions(kept):
    decision = ["chosen: all", {"pipeline": "eager_1f1b", "active_microbatches": 2}, {"mm": 0.25}]
    assert kept.decision(captured(), (Config(), 7), lambda: decision) == decision
    line, *found = kept.decision(captured(), (Config(), 7), refuse)
    assert line == "chosen: all (an earlier start has measured that)" and found == decision[1:]
    for step, facts in (
        (captured(power=3), (Config(), 7)),
        (captured(), (Config(microbatches=2), 7)),
        (captured(), (Config(), 8)),
    ):
        with pytest.raises(AssertionError):
            kept.decision(step, facts, refuse)


def lower(kept, step, plan=None, **keys):
    config = Config(pipeline_parallel_degree=2, microbatches=4, **keys)
    backend = NullBackend()
    cut = cut_step(step, config, backend.lowering, {}, None)
    actions = schedule_step(cut, config)[0]
    own = [stage for stage in cut.stages if cut.placement[stage.index] == 0]
    how = actions, 0
    more = "keep", True, False
    plan = plan or (lambda: plan_stages(own, *how, backend.lowering, *more))
    return kept.planned(own, (*how, *more), plan)


def rows(module):
    """A graph as it runs, with what errors say of its nodes."""
    found = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        spec = TensorSpec.of(value) if isinstance(value, torch.Tensor) else None
        where = describe(node) if node.op == "call_function" else ""
        found.append((node.op, str(node.target), str(node.args), str(node.kwargs), spec, where))
    return found


@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_lowered_stages(kept, pipeline):
    step = captured()
    before = lower(kept, step, pipeline=pipeline)
    after = lower(kept, captured(), refuse, pipeline=pipeline)
    assert before.keys() == after.keys()
    for one, other in ((before[i], after[i]) for i in before):
        assert one is not other
        assert rows(one.lowered.forward) == rows(other.lowered.forward)
        assert "first" in str(rows(other.lowered.forward)), "errors name the module"
        derivatives = one.lowered.backward.derivative, other.lowered.backward.derivative
        assert rows(derivatives[0]) == rows(derivatives[1])
        for name in ("forward_inputs", "saved", "saved_specs", "backward_inputs", "grad_ports"):
            assert getattr(one.lowered, name) == getattr(other.lowered, name)
        assert (one.split is None) == (other.split is None) == (pipeline == "interleaved")
        assert other.lowered.spec.graph is not one.lowered.spec.graph
    for others in ({"step": captured(width=9)}, {"step": step, "active_microbatches": 1}):
        with pytest.raises(AssertionError):
            lower(kept, others.pop("step"), refuse, pipeline=pipeline, **others)


def test_what_cannot_be_read_is_lowered_anew(kept, caplog, monkeypatch):
    lower(kept, captured())
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "get", lambda kept, key: b"of another version")
        (stage,) = lower(kept, captured()).values()
    assert stage.lowered.forward is not None
    assert "what an earlier start has kept cannot be read, and is made anew" in caplog.text


def test_graphs_in_use_keep_what_they_know(kept):
    """Writing a stage down leaves out some of what its nodes know, and puts it back."""
    (stage,) = lower(kept, captured()).values()
    metas = [set(node.meta) for node in stage.lowered.forward.graph.nodes]
    assert any("from_node" in meta for meta in metas)
    assert all(
        isinstance(n.meta["val"], torch.Tensor)
        for n in stage.lowered.forward.graph.find_nodes(op="placeholder")
    )
