"""The backend that runs operator by operator: right numbers, and errors at the user's line."""

import contextlib
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla import log
from mpxla.device.choice import open_backend
from mpxla.device.eager import EagerBackend
from mpxla.env import read_environment
from mpxla.errors import ConfigError, MpxlaError
from mpxla.stage.spec import TensorSpec
from mpxla.tests.parity import Case, train, train_plainly
from mpxla.tests.parity_checks import assert_parity
from mpxla.tests.ranks.run import RankError, run_ranks

EAGER = {"MPXLA_EAGER": "1", "MPXLA_DEVICE": ""}


def traced(function, *inputs):
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)
    specs = [TensorSpec.of(value) for value in inputs]
    return EagerBackend().compile("stage 0 forward", graph, specs)


@pytest.mark.unit
def test_results_have_memory_of_their_own():
    x = torch.ones(3)
    program = traced(lambda x: [x, x.view(3, 1), x + 1, x], x)
    results = program([x])
    for result in results:
        result.zero_()
    assert x.tolist() == [1, 1, 1]
    again = program([x])
    again[0].zero_()
    assert [r.flatten().tolist() for r in again[1:]] == [[1, 1, 1], [2, 2, 2], [1, 1, 1]]


@pytest.mark.unit
def test_strides_are_those_of_the_trace():
    traced_as = torch.arange(6.0).view(2, 3).t()
    program = traced(lambda x: [x.as_strided((2,), (1,))], traced_as)
    (found,) = program([traced_as.contiguous()])
    assert found.tolist() == traced_as.as_strided((2,), (1,)).tolist() == [0, 1]


@pytest.mark.unit
def test_random_operators_draw_from_the_seed_alone():
    program = traced(lambda x: [torch.dropout(x, 0.5, True)], torch.ones(64))
    assert program.is_random
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = (program([torch.ones(64)], torch.tensor(s))[0] for s in (7, 7, 8))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.unit
def test_the_operator_that_makes_nan_is_named_once():
    heard = io.StringIO()
    log.forget_warnings()
    program = traced(lambda x: [(x.log() * 2).sum()], torch.ones(2))
    with contextlib.redirect_stderr(heard):
        log.get_logger().setLevel(logging.INFO)
        program([torch.tensor([1.0, -1.0])])
        program([torch.tensor([1.0, -1.0])])
        program([torch.tensor([float("nan"), 1.0])])
    assert heard.getvalue().count("is the first to give NaN") == 1
    assert "stage 0 forward: aten::log" in heard.getvalue()


@pytest.mark.unit
def test_the_environment_chooses_it(monkeypatch):
    assert read_environment(EAGER).device == "eager"
    assert read_environment({"MPXLA_EAGER": "0"}).device is None
    assert open_backend(read_environment(EAGER)).name == "eager"
    with pytest.raises(ConfigError, match="MPXLA_EAGER=1 runs the step on the host, and MPXLA_DEV"):
        read_environment({**EAGER, "MPXLA_DEVICE": "pjrt"})
    with pytest.raises(ConfigError, match="MPXLA_EAGER=yes must be 1 or 0"):
        read_environment({"MPXLA_EAGER": "yes"})
    with pytest.raises(ConfigError, match=r"with MPXLA_EAGER=1 .* nothing is compiled"):
        EagerBackend().open_runner(None, "")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("gpt", 2, 3, "zero_bubble"), marks=pytest.mark.slow),
        Case("conv_net", 2, 2, keys=(("optimize", "speed"),)),
    ],
    ids=str,
)
def test_trains_as_in_one_process(case):
    observed = run_ranks(train, case.stages, case, env=EAGER)
    assert_parity(observed, train_plainly(case))


class WritesAndGroups(nn.Module):
    """Assigns to a part of a tensor; groups of channels and classes of a transposed one."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        y = self.line(x)
        y[..., ::2] *= 0.5
        classes = torch.zeros(x.shape[:2], dtype=torch.int64)
        loss = F.nll_loss(y.log_softmax(-1).transpose(1, 2), classes)
        return loss + (self.norm(y.transpose(1, 2)).transpose(1, 2) * x).sum()


def gradients_of(make):
    torch.manual_seed(2)
    model, x = make(WritesAndGroups()), torch.randn(2, 3, 4)

    @smp.step
    def step(x):
        loss = model(x)
        model.backward(loss)
        return loss

    if isinstance(model, smp.DistributedModel):
        step(x)
    else:
        model(x).backward()
    return [p.grad.tolist() for p in model.parameters()]


def differentiate_writes_and_groups():
    smp.init({})
    return gradients_of(smp.DistributedModel)


@pytest.mark.ranks
def test_operators_without_a_derivative_or_a_kernel_for_every_layout():
    (found,) = run_ranks(differentiate_writes_and_groups, 1, env=EAGER)
    expected = gradients_of(lambda model: model)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(other))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        doubled = x * 2
        return self.head(self.table(doubled))


def look_up_too_far():
    smp.init({"microbatches": 2, "check_indices": False})
    model = smp.DistributedModel(Table())

    @smp.step
    def step(model, x):
        return model(x).sum()

    step(model, torch.tensor([0, 1, 2, 3])).reduce_mean().item()


@pytest.mark.ranks
def test_a_failing_operator_is_named_with_the_users_line():
    with pytest.raises(RankError) as caught:
        run_ranks(look_up_too_far, 1, env=EAGER)
    text = str(caught.value)
    assert "stage 0 forward: aten::embedding in model.table" in text
    assert "microbatch 1" in text
    assert f"{__file__}:" in text and "return self.head(self.table(doubled))" in text


@pytest.mark.unit
def test_an_error_is_one_of_mpxla():
    program = traced(lambda x, i: [x[i]], torch.ones(2), torch.tensor([0]))
    with pytest.raises(MpxlaError, match="stage 0 forward: aten::index in the step function"):
        program([torch.ones(2), torch.tensor([5])])
