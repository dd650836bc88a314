"""Every wrong use of mpxla ends with a text that says what to do, on all ranks.

`refused` runs on every rank; it collects the error that the use raises there. What is wrong with
single values of the configuration is tested in `test_config`, with partitions in `graph/`.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import (
    CaptureError,
    ConfigError,
    LoweringError,
    MpxlaError,
    PartitionError,
    PeerFailure,
    RankMismatch,
    StepError,
    TopologyError,
)
from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks

BATCH = 4
TWO = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"ddp": True, "microbatches": 2}


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def made(config=TWO, **options):
    smp.init(config)
    torch.manual_seed(0)
    return smp.DistributedModel(Net(), **options)


def batch():
    return torch.ones(BATCH, 5)


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return model(x)


def refused(use: Callable[[], Any]) -> tuple[str, str]:
    """Runs on every rank: class and text of the error that a use raises."""
    try:
        use()
    except MpxlaError as error:
        assert type(error).__module__ == "mpxla.errors"
        kind = next(k for k in type(error).__mro__ if k in _KINDS)
        return kind.__name__, str(error)
    return "nothing", "was raised"


_KINDS = (
    *(CaptureError, ConfigError, LoweringError, PartitionError, PeerFailure, RankMismatch),
    *(StepError, TopologyError, MpxlaError),
)


def check(use, kind, pattern, world_size=2, at=None):
    """A use is refused on all ranks, or on those `at` which the text is expected."""
    results = run_ranks(refused, world_size, use)
    ranks = range(world_size) if at is None else at
    check_texts([results[rank] for rank in ranks], kind, pattern)
    return results


def check_texts(results, kind, pattern):
    """Every rank raises the error itself, and not the news of another rank's."""
    for found, text in results:
        assert found == kind.__name__, text
        assert re.search(pattern, text, re.DOTALL), text


# Configuration.


def misspell_a_key():
    smp.init({"pipeline_parallel_degree": 2, "microbatchs": 4})


def test_misspelt_key():
    check(
        misspell_a_key,
        ConfigError,
        r"microbatchs \(from smp\.init\) is not a configuration key; did you mean microbatches\?",
    )


def combine_what_does_not_go_together():
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 5, "horovod": True})


def test_refused_combinations():
    check(
        combine_what_does_not_go_together,
        ConfigError,
        r"2 problems:.*default_partition: 5 must be below pipeline_parallel_degree: 2.*"
        r"horovod: True is for TensorFlow only",
    )


def ask_for_four_partitions():
    smp.init({"pipeline_parallel_degree": 4})


def test_world_size_that_does_not_divide():
    check(
        ask_for_four_partitions,
        TopologyError,
        r"2 processes cannot .*pipeline_parallel_degree|pipeline_parallel_degree.* 4",
    )


def start_replicas_without_ddp():
    smp.init({"pipeline_parallel_degree": 1})


def test_replicas_need_ddp():
    check(start_replicas_without_ddp, ConfigError, r"2 replicas of the model .* set ddp: True")


def ask_for_process_groups():
    smp.init(TWO)
    smp.get_dp_process_group()


def test_process_groups_need_ddp():
    check(ask_for_process_groups, ConfigError, r"process groups are made with ddp: True; set it")


# Order of calls.


def step_before_model():
    smp.init(TWO)
    train(None, batch())


def test_step_before_model():
    check(
        step_before_model,
        MpxlaError,
        r"step function train was called before smp\.DistributedModel; wrap the model first",
    )


def optimizer_before_model():
    smp.init(TWO)
    smp.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1))


def test_optimizer_before_model():
    check(
        optimizer_before_model,
        MpxlaError,
        r"DistributedOptimizer was called before smp\.DistributedModel; wrap the model first",
    )


def two_models():
    made()
    smp.DistributedModel(Net())


def test_second_model():
    check(two_models, MpxlaError, r"second smp\.DistributedModel .* Put all networks into one mod")


def wrap_other_things():
    smp.init(TWO)
    early = [
        lambda: smp.DistributedModel(len),
        lambda: smp.DistributedModel(Net(), trace_device="tpu"),
        lambda: smp.DistributedModel(Net(), trace_device="cpu", trace_execution_times=True),
        lambda: smp.DistributedModel(Net(), trace_execution_times=True),
        lambda: smp.DistributedModel(Net(), backward_passes_per_step=0),
    ]
    found = [refused(use) for use in early]
    model = smp.DistributedModel(Net())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(sgd)
    late = [
        lambda: smp.DistributedModel(model),
        lambda: smp.DistributedOptimizer(model),
        lambda: smp.DistributedOptimizer(optimizer),
        lambda: smp.DistributedOptimizer(sgd, dynamic_loss_scale=True),
        lambda: smp.DistributedOptimizer(sgd, static_loss_scale=8.0),
        lambda: optimizer.step(lambda: 0.0),
        lambda: model.register_comm_hook(None, None),
        lambda: model.state_dict(prefix="a"),
    ]
    return found + [refused(use) for use in late]


def test_wrapping_other_things():
    expected = [
        ("MpxlaError", r"wraps a torch\.nn\.Module, not builtin_function_or_method"),
        ("ConfigError", r"trace_device is 'tpu'; use 'gpu' or 'cpu'"),
        ("ConfigError", r"trace_execution_times=True does not go with trace_device='cpu'"),
        ("ConfigError", r"trace_execution_times=True is not available yet"),
        ("ConfigError", r"backward_passes_per_step is 0; use an integer from 1"),
        ("MpxlaError", r"this model is a DistributedModel already"),
        ("MpxlaError", r"wraps a torch\.optim\.Optimizer, not a DistributedModel"),
        ("MpxlaError", r"this optimizer is a DistributedOptimizer already"),
        ("ConfigError", r"loss scaling belongs to fp16 training, which mpxla does not have yet"),
        ("ConfigError", r"leave static_loss_scale at 1\.0"),
        ("MpxlaError", r"DistributedOptimizer\.step takes no closure"),
        ("ConfigError", r"register_comm_hook needs ddp: True\."),
        ("MpxlaError", r"DistributedModel\.state_dict takes gather_to_rank0 only"),
    ]
    for found in run_ranks(wrap_other_things, 2):
        for (kind, text), (expected_kind, pattern) in zip(found, expected, strict=True):
            assert kind == expected_kind, text
            assert re.search(pattern, text), text


def use_the_model_outside():
    model = made()
    found = [refused(lambda: model(batch())), refused(lambda: model.backward(torch.ones(())))]
    for name in ("local_parameters", "local_named_buffers", "local_modules", "local_state_dict"):
        found.append(refused(getattr(model, name)))
    found.append(refused(model.partition_report))
    train(model, batch())
    found.append(refused(lambda: smp.set_partition(model.module.first, 0)))
    found.append(refused(lambda: model.register_post_partition_hook(print)))
    found.append(refused(lambda: model(batch())))
    return found


def test_model_outside_of_a_step():
    outside = r"called outside a step function\. With pipeline_parallel_degree > 1 its parts live"
    after = "is known after the first call of a step function"
    expected = [
        ("StepError", outside),
        ("StepError", r"model\.backward was called outside a step function"),
        ("MpxlaError", rf"model\.local_parameters {after}"),
        ("MpxlaError", rf"model\.local_named_buffers {after}"),
        ("MpxlaError", rf"model\.local_named_modules {after}"),
        ("MpxlaError", rf"model\.local_state_dict {after}"),
        ("MpxlaError", "partitioned by the first call of a step function"),
        ("MpxlaError", r"set_partition was called after the model was partitioned"),
        ("MpxlaError", r"register_post_partition_hook was called after the model was partitioned"),
        ("StepError", outside),
    ]
    for found in run_ranks(use_the_model_outside, 2):
        for (kind, text), (expected_kind, pattern) in zip(found, expected, strict=True):
            assert kind == expected_kind, text
            assert re.search(pattern, text), text


# Arguments of a step.


def feed(rank_0_input):
    """A batch that cannot be used, then a good one: all ranks are still in step."""
    model = made()
    text = refused(lambda: train(model, rank_0_input if smp.rank() == 0 else batch()))
    return text, train(model, batch()).reduce_mean().item()


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (torch.ones(5, 5), r"^x: a batch of 5 samples .* does not divide into 2 microbatches"),
        (torch.tensor(1.0), r"^x: a tensor of shape \[\] has no axis 0"),
        ({torch.tensor(1.0)}, r"^x\[\.\.\.\]: a tensor of shape \[\] has no axis 0"),
    ],
)
def test_batch_that_does_not_divide(value, pattern):
    results = run_ranks(feed, 2, value)
    for rank, ((kind, text), _) in enumerate(results):
        assert kind == "StepError"
        assert re.search(pattern, text), text
        assert text.endswith("(found on pp_rank 0)") == (rank == 1)
    assert results[0][1] == results[1][1] > 0


class Uneven:
    def smp_slice(self, num_mb, mb, axis):
        return torch.ones(2 + mb, 5)


def slice_unevenly():
    train(made(), Uneven())


def test_uneven_slices():
    check(slice_unevenly, RankMismatch, r"microbatch 1 differs from microbatch 0 .* smp_slice has")


class Exploding:
    def smp_slice(self, num_mb, mb, axis):
        raise KeyError("no such column")


def fail_to_slice():
    try:
        train(made(), Exploding())
    except KeyError as error:
        return "KeyError", str(error)
    except PeerFailure as error:
        return "PeerFailure", str(error)


def test_an_error_in_smp_slice_is_known_everywhere():
    first, second = run_ranks(fail_to_slice, 2)
    assert first == ("KeyError", "'no such column'")
    assert second[0] == "PeerFailure"
    assert "rank 0 raised KeyError in step function" in second[1]


def call_with_wrong_arguments():
    train(made(), batch(), 3)


def test_arguments_that_do_not_fit_the_function():
    check(call_with_wrong_arguments, StepError, r"train: too many positional arguments")


def name_unknown_parameters():
    smp.step(non_split_inputs=["mask"])(lambda model, x: None)


def test_options_that_name_no_parameter():
    check(name_unknown_parameters, StepError, r"mask in non_split_inputs .* are model, x\.")


# The step function.


@smp.step
def branch_on_a_tensor(model, x):
    loss = model(x).mean()
    if loss > 0:
        loss = loss * 2
    model.backward(loss)
    return loss


@smp.step
def detach_the_loss(model, x):
    loss = model(x).mean().detach()
    model.backward(loss)
    return loss


@smp.step
def differentiate_a_constant(model, x):
    loss = x.mean()
    model.backward(loss)
    return loss


@smp.step
def differentiate_a_matrix(model, x):
    model.backward(model(x))


@smp.step
def give_too_few_gradients(model, x):
    y = model(x)
    model.backward([y, y], [torch.ones_like(y)])


@smp.step
def give_a_wrong_gradient(model, x):
    model.backward(model(x), torch.ones(7))


@smp.step
def call_autograd(model, x):
    model(x).mean().backward()


@smp.step
def nest_steps(model, x):
    return train(model, x)


class Holder:
    def __init__(self, value):
        self.value = value


@smp.step
def hide_a_tensor(model, x):
    return Holder(model(x))


@smp.step
def compute_with_a_number(model, x):
    loss = model(x).mean()
    return loss * loss.item()


_stranger = nn.Linear(5, 3)


@smp.step
def use_a_stranger(model, x):
    loss = (model(x) + _stranger(x)).mean()
    model.backward(loss)


@smp.step
def mismatch_shapes(model, x):
    return model(x[:, :2])


def run_step(name):
    return refused(lambda: globals()[name](made(), batch()))


@pytest.mark.parametrize(
    ("name", "kind", "pattern"),
    [
        (
            "branch_on_a_tensor",
            CaptureError,
            r"depends on a tensor's value in Python at .*test_wrong_use\.py:\d+: if loss > 0:",
        ),
        (
            "detach_the_loss",
            CaptureError,
            r"model\.backward was called on a tensor that no parameter contributed to at .*:\d+: "
            r"model\.backward\(loss\)",
        ),
        ("differentiate_a_constant", CaptureError, "that no parameter contributed to at"),
        (
            "differentiate_a_matrix",
            CaptureError,
            r"tensor of shape \[2, 3\] without a gradient at .* Reduce the loss to a scalar",
        ),
        ("give_too_few_gradients", CaptureError, r"got 2 tensors and 1 gradients at .*:\d+"),
        ("give_a_wrong_gradient", CaptureError, r"shape \[7\] for a tensor of shape \[2, 3\]"),
        (
            "call_autograd",
            CaptureError,
            r"backward\(\) was called in a step function at .*Call mod",
        ),
        ("nest_steps", StepError, "step function train was called inside another step function"),
        ("hide_a_tensor", CaptureError, r"object of type Holder that holds tensors \(value\)"),
        (
            "compute_with_a_number",
            CaptureError,
            r"number read by \.item\(\) is used in a computation .* by aten\.mul in the step",
        ),
        (
            "use_a_stranger",
            CaptureError,
            r"trainable parameter of shape \[3.*\] that is not read from the",
        ),
        ("mismatch_shapes", CaptureError, r"could not be captured at .*test_wrong_use\.py:\d+"),
    ],
)
def test_step_functions_that_cannot_be_captured(name, kind, pattern):
    check_texts(run_ranks(run_step, 2, name), kind, pattern)


def raise_in_function():
    model = made()

    @smp.step
    def function(model, x):
        raise LookupError("my own error")

    try:
        function(model, batch())
    except LookupError as error:
        return str(error), error.__notes__


def test_errors_of_the_user_keep_their_class():
    for text, (note,) in run_ranks(raise_in_function, 2):
        assert text == "my own error"
        assert "raised while the step function was captured at" in note
        assert 'raise LookupError("my own error")' in note


class Eigen(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x.T @ x).real


class WithoutLowering(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.odd = Eigen()

    def forward(self, x):
        return self.odd(self.body(x))


def use_an_operator_without_lowering():
    smp.init({**TWO, "auto_partition": False, "default_partition": 0})
    raw = WithoutLowering()
    model = smp.DistributedModel(raw)
    smp.set_partition(raw.odd, 1)
    out = evaluate(model, batch())
    return out.concat()


def test_operator_without_lowering():
    first, _ = check(
        use_an_operator_without_lowering,
        LoweringError,
        r"^stage 1 forward: operators without an XLA lowering:\n  aten::linalg_eig\w* in "
        r"model\.odd.* Replace them in the model",
        at=[1],
    )
    assert first[0] == "PeerFailure"
    assert "rank 1 raised LoweringError in step function" in first[1]


# Placement.


def place_out_of_range():
    smp.init(TWO)
    with smp.partition(2):
        nn.Linear(1, 1)


def test_partition_out_of_range():
    check(
        place_out_of_range,
        PartitionError,
        r"smp\.partition\(2\): pipeline_parallel_degree is 2, so valid indices are 0 to 1",
    )


def place_out_of_range_before_init():
    with smp.partition(3):
        raw = Net()
    smp.init({**TWO, "auto_partition": False, "default_partition": 0})
    train(smp.DistributedModel(raw), batch())


def test_partition_out_of_range_before_init():
    check(
        place_out_of_range_before_init, PartitionError, r"Partitions are 0 to 1, but .*partit.* 3"
    )


# Ranks that differ.


def differ_in_configuration():
    import os

    smp.init({**TWO, "microbatches": 2 + int(os.environ["RANK"]), "pipeline": "simple"})


def test_different_configurations():
    check(
        differ_in_configuration,
        RankMismatch,
        r"ranks 0 and 1 were started with different configurations:\n"
        r"microbatches: 2 on rank 0, 3 on rank 1\n",
    )


def differ_in_width():
    smp.init(TWO)
    train(smp.DistributedModel(Net(6 + 2 * smp.rank())), batch())


def test_different_models():
    check(
        differ_in_width,
        RankMismatch,
        r"ranks \[1\] have another model or script than rank 0:\n"
        r"  first\.weight: float32\[6, 5\] on rank 0\n"
        r"  first\.weight: float32\[8, 5\] on rank 1\nStart the same script",
    )


def replicas_differ_in_width():
    smp.init(REPLICAS)
    model = smp.DistributedModel(Net(6 + 2 * smp.rank()))
    train(model, batch())


def test_different_models_of_replicas():
    pattern = r"ranks \[1\] have another model than rank 0:\n.*\[6, 5\] on rank 0\n.*\[8, 5\] on"
    check(replicas_differ_in_width, RankMismatch, pattern)


def differ_in_step():
    model = made()

    @smp.step
    def function(model, x):
        y = model(x)
        return y.relu() if smp.rank() else y.sigmoid()

    function(model, batch())


def test_different_bodies_of_a_step():
    check(
        differ_in_step,
        RankMismatch,
        r"ranks \[1\] captured another step than rank 0:\n[^\n]*sigmoid[^\n]* on rank 0\n"
        r"[^\n]*relu[^\n]* on rank 1\n",
    )


def differ_in_function():
    model = made()
    (evaluate if smp.rank() else train)(model, batch())


def test_different_step_functions():
    first, _ = check(
        differ_in_function,
        RankMismatch,
        r"pp_rank 0 calls the step function \S*train while rank 1 \(pp_rank 1\) calls \S*evaluate",
        at=[1],
    )
    assert first[0] == "PeerFailure"
    assert "rank 1 raised RankMismatch" in first[1]


def differ_in_objects():
    model = made()
    step = smp.step(lambda model, x, criterion: criterion(model(x)))
    step(model, batch(), nn.ReLU() if smp.rank() == 0 else None)


def test_different_arguments():
    first, _ = check(
        differ_in_objects,
        RankMismatch,
        r"pp_rank 0 passes a ReLU at \[0\]\[2\], and this rank passes none there",
        at=[1],
    )
    assert first[0] == "PeerFailure"


def differ_in_mode():
    model = made()
    if smp.rank() == 1:
        model.eval()
    train(model, batch())


def test_different_modes():
    first, _ = check(
        differ_in_mode,
        RankMismatch,
        r"train/eval mode of the model on rank 1 differs from pp_rank 0\. Call model\.train\(\)",
        at=[1],
    )
    assert first[0] == "PeerFailure"


def differ_in_mode_later():
    model = made()
    train(model, batch())
    return differ_in_mode_of(model)


def differ_in_mode_of(model):
    if smp.rank() == 1:
        model.eval()
    return refused(lambda: train(model, batch()).reduce_mean().item())


def test_different_modes_in_a_later_step():
    first, second = run_ranks(differ_in_mode_later, 2)
    assert second[0] == "RankMismatch"
    assert first[0] == "PeerFailure"


# Objects and arguments that a step accepts with a warning.


def discouraged():
    from mpxla.log import get_logger

    lines = []

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    model = made(gradient_as_bucket_view=True)
    smp.step(detach_outputs=False)(lambda model, x: model(x))
    step = smp.step(lambda model, x, other, optimizer: F.relu(model(x)))
    step(model, batch(), Holder(3), torch.optim.SGD(model.parameters(), lr=0.1))
    get_logger().removeHandler(handler)
    return [line for line in lines if not re.search("compiled|configuration|stage ", line)]


def test_warnings():
    first, _ = run_ranks(discouraged, 2)
    expected = [
        r"gradient_as_bucket_view=True\) has no effect",
        r"detach_outputs=False\) has no effect",
        r"other of type Holder is passed whole .* smp_slice\(num_mb, mb, axis\)",
        r"gets an optimizer \(optimizer\), which is probably a bug",
    ]
    assert len(first) == len(expected), first
    assert all(re.search(p, line) for p, line in zip(expected, first, strict=True)), first
