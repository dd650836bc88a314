"""Operators that the device has no code for: they run on the host between two pieces of a stage."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.models import classify, labelled, mlp
from mpxla.tests.parity import Case, Plain, train, train_plainly
from mpxla.tests.parity_checks import assert_parity
from mpxla.tests.programs import host_operators
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.stage.single import differences

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("host", 1, 2), marks=pytest.mark.slow),
        Case("host", 2, 4, "zero_bubble", manual=True),
        pytest.param(Case("host", 2, 3, "interleaved"), marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(Case("host", 2, 2, "simple", manual=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_that_of_plain_torch(case):
    ranks, plain = run_ranks(train, case.stages, case, timeout_s=200), train_plainly(case)
    assert_parity(ranks, plain)
    assert [found.later_compilations for found in ranks] == [0] * case.stages


# --- what is said about them --------------------------------------------------------------------


class Odd(nn.Module):
    """A host operator forward and backward, and dropout before and after it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(64))
        self.second = nn.Parameter(torch.ones(64))

    def forward(self, x):
        before = F.dropout(x * self.first, 0.5)
        square = before.view(1, 1, 8, 8)
        small = F.interpolate(square, (4, 4), mode="bilinear", antialias=True)
        after = F.dropout(small.sum() * 0 + x * self.second, 0.5)
        return before, after


def drop(model, x):
    before, after = model(x)
    model.backward(before.sum() + after.sum())
    return before, after


def messages():
    from mpxla.log import get_logger

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    return lines


def train_odd():
    smp.init({"microbatches": 2})
    lines = messages()
    model = smp.DistributedModel(Odd())
    step, x, rows = smp.step(drop), torch.ones(2, 64), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = step(model, x)
        rows.append(
            (
                [output.concat().cpu() for output in outputs],
                [p.grad.cpu().clone() for p in model.parameters()],
            )
        )
    (plan,) = model._engine.calls.plans
    (stage,) = plan.runner.plan.programs.values()
    programs = {program.name: program for program in stage.programs}
    named = {name: host_operators(program) for name, program in programs.items()}
    return rows, lines, named


@pytest.fixture(scope="module")
def odd():
    (found,) = run_ranks(train_odd, 1)
    return found


def test_random_pieces_of_a_stage_draw_different_numbers(odd):
    (first, again, other), *_ = odd
    for (before, after), gradients in (first, again, other):
        assert set(before.unique().tolist()) == set(after.unique().tolist()) == {0.0, 2.0}
        assert not torch.equal(before, after)
        # The gradient goes through the very mask that the forward drew, over both microbatches.
        torch.testing.assert_close(gradients[0], before.mean(0))
        torch.testing.assert_close(gradients[1], after.mean(0))
    for mine, same in zip(first[0], again[0], strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(first[0][1], other[0][1])


def test_one_line_per_operator_names_it_and_its_cost(odd):
    _, lines, *_ = odd
    (line,) = [line for line in lines if "aten::_upsample_bilinear2d_aa in model" in line]
    assert line.startswith("stage 0 forward, piece 2 of 3: aten::")
    assert re.search(r" in model \(\S*test_host_operators.py:\d+: small = F.interpolate", line)
    assert "runs on the host: 320 bytes moved per call, " in line
    assert " ms in the first one. Each call waits for the device." in line


def test_programs_have_the_host_operators_that_they_need(odd):
    *_, named = odd
    assert named["stage 0 forward"] == ("aten::_upsample_bilinear2d_aa",)
    assert named["stage 0 backward"] == ("aten::_upsample_bilinear2d_aa_backward",)


def test_shapes_that_depend_on_values_are_refused():
    where = r"^aten::\w+ in model \(\S*test_host_operators.py:\d+: "
    text = where + ".*depends on values.*torch.nonzero_static"
    with pytest.raises(smp.CaptureError, match=text):
        differences(lambda h: h.sum() + h.detach().unique(dim=0).sum())


# --- a failed step leaves the process usable ----------------------------------------------------


def recognize(model, x, symbols, lengths):
    logits = model(x).view(-1, 4, 5).log_softmax(-1).transpose(0, 1)
    steps = torch.full((len(symbols),), 4)
    model.backward(F.ctc_loss(logits, symbols, steps, lengths, zero_infinity=True))


def impossible(model, x):
    return model(x, is_odd=True)


class Refused(nn.Module):
    """A model that reaches an operator without any kernel if it is told to."""

    def __init__(self):
        super().__init__()
        self.plain, self.odd = nn.Sequential(mlp(), nn.Linear(5, 20)), Nowhere()

    def forward(self, x, is_odd=False):
        found = self.plain(x)
        return self.odd(found) if is_odd else found


class Nowhere(nn.Module):
    def forward(self, x):
        return torch.ops.mpxla_test.nowhere(x)


def losses(model, optimizer, step, microbatches):
    found = []
    for number in range(3):
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(number)
            batch = labelled((12,), 4)
        value = step(model, batch)["loss"]
        found.append(value.reduce_mean().item() if microbatches else value.item())
        optimizer.step()
    return found


def begun(stages):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": stages})
    torch.manual_seed(0)
    model = smp.DistributedModel(Refused())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def fail_and_go_on(stages):
    """Fails in a compilation, and on one rank in a run; trains after it, in two sessions."""
    library = torch.library.Library("mpxla_test", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    torch.library.register_fake("mpxla_test::nowhere", torch.empty_like, lib=library)
    texts, rows = [], []
    for _ in range(2):
        model, optimizer = begun(stages)
        texts += [caught(smp.step(impossible), model, torch.zeros(4, 12))]
        if stages == 1:
            wrong = torch.ones(4, 3, dtype=torch.int64), torch.full((4,), 9)
            texts += [caught(smp.step(recognize), model, torch.zeros(4, 12), *wrong)]
        rows.append(losses(model, optimizer, smp.step(classify), 2))
        smp.shutdown()
    return texts, rows


def caught(step, *arguments):
    try:
        step(*arguments)
    except smp.MpxlaError as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing", "was raised"


def plain_losses():
    torch.manual_seed(0)
    model = Refused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(wrapped, batch):
        parts = [{k: v.chunk(2)[i] for k, v in batch.items()} for i in range(2)]
        return {"loss": torch.stack([classify(wrapped, p)["loss"].detach() for p in parts]).mean()}

    return losses(Plain(model, 2), optimizer, step, 0)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_failed_step_leaves_the_process_usable(stages):
    expected = plain_losses()
    for rank, (texts, rows) in enumerate(run_ranks(fail_and_go_on, stages, stages)):
        for row in rows:
            assert row == pytest.approx(expected, rel=1e-5), f"rank {rank}"
        refused = [text for text in texts if "nowhere" in text[1]]
        assert len(refused) == 2
        kind = "LoweringError" if rank == stages - 1 else "PeerFailure"
        assert {name for name, _ in refused} == {kind}
        assert f"stage {stages - 1} forward: mpxla_test::nowhere in model.odd (" in refused[0][1]
        assert re.search(r"test_host_operators.py:\d+: return torch.ops.mpxla_test", refused[0][1])
        assert re.search(r"can run neither on the (XLA )?device nor on the host", refused[0][1])
        for name, text in [text for text in texts if text not in refused]:
            assert name == "MpxlaError"
            assert re.search(
                r"aten::_ctc_loss in the step function.*, which runs on the host", text
            )
            assert "failed: Expected " in text
            assert "forward of stage 0, microbatch 0" in text
