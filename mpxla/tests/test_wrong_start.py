"""Wrong use before the first step ends with a text that says what to do, on all ranks.

What is wrong with single values of the configuration is tested in `test_config`, with partitions in
`graph/`.
"""

import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import (
    ConfigError,
    MpxlaError,
    PartitionError,
    TopologyError,
)
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import TWO, Net, batch, check, made, refused, train

pytestmark = pytest.mark.ranks


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


def wrap_other_things():
    smp.init(TWO)
    early = [
        lambda: smp.DistributedModel(len),
        lambda: smp.DistributedModel(Net(), trace_device="tpu"),
        lambda: smp.DistributedModel(Net(), trace_device="cpu", trace_execution_times=True),
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
        lambda: smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters())).step(),
        lambda: model.register_comm_hook(None, None),
        lambda: model.state_dict(prefix="a"),
    ]
    return found + [refused(use) for use in late]


def test_wrapping_other_things():
    expected = [
        ("MpxlaError", r"wraps a torch\.nn\.Module, not builtin_function_or_method"),
        ("ConfigError", r"trace_device is 'tpu'; use 'gpu' or 'cpu'"),
        ("ConfigError", r"trace_execution_times=True does not go with trace_device='cpu'"),
        ("ConfigError", r"backward_passes_per_step is 0; use an integer from 1"),
        ("MpxlaError", r"this model is a DistributedModel already"),
        ("MpxlaError", r"wraps a torch\.optim\.Optimizer, not a DistributedModel"),
        ("MpxlaError", r"this optimizer is a DistributedOptimizer already"),
        (
            "MpxlaError",
            r"LBFGS calls the loss function several times .*: give optimizer\.step a closure",
        ),
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
