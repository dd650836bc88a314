"""What `DistributedModel` says it holds, and its options."""

import pytest
import torch

import mpxla as smp
from mpxla.tests.clients import (
    Net,
    close,
    data,
    gradients,
    merged,
    plain_gradients,
    raw_model,
    start,
    train_step,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Shifted(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("shift", torch.ones(sizes[1]))

    def forward(self, x):
        return super().forward(x) + self.shift


class WithBuffers(Net):
    """With a buffer in each part, and a module that holds nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Shifted(5, 6), Shifted(6, 3)
        self.activation = torch.nn.Tanh()


def look_at_what_is_held():
    start(auto_partition=False, default_partition=0)
    model = smp.DistributedModel(WithBuffers())
    smp.set_partition(model.module.second, 1)
    seen = [smp.is_tracing()]

    @smp.step
    def step(model, x, y):
        seen.append(smp.is_tracing())
        return train_step(model, x, y)

    assert not model.partitioned
    step(model, *data())
    seen.append(smp.is_tracing())
    named = {
        "parameters": dict(model.local_named_parameters()),
        "buffers": dict(model.local_named_buffers()),
        "modules": dict(model.local_named_modules()),
    }
    for what, found in named.items():
        alone = list(getattr(model, f"local_{what}")())
        assert [id(v) for v in alone] == [id(v) for v in found.values()]
    assert named["modules"][""] is model.module
    return {what: list(found) for what, found in named.items()}, seen, model.partitioned


def test_a_rank_tells_what_it_holds():
    for rank, (held, seen, partitioned) in enumerate(run_ranks(look_at_what_is_held, 2)):
        part = ("first", "second")[rank]
        assert held == {
            "parameters": [f"{part}.weight", f"{part}.bias"],
            "buffers": [f"{part}.shift"],
            "modules": ["", part],
        }
        assert partitioned
        assert seen[0] is seen[-1] is False
        assert seen[1:-1] == [True, True], "each microbatch appends what the capture has"


def gather_states():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9))
    smp.step(train_step)(model, *data())
    optimizer.step()
    partial = model.local_state_dict()
    everywhere, first = model.state_dict(), model.state_dict(gather_to_rank0=True)
    for parameter in model.local_parameters():
        parameter.data.zero_()
    with pytest.raises(smp.MpxlaError, match="Leave assign out, or load into the model before"):
        model.load_state_dict(everywhere, assign=True)
    model.load_state_dict(partial, same_partition_load=True)
    again = model.state_dict()
    inner = optimizer.orig_state_dict()
    return everywhere, again, sorted(first), sorted(partial), sorted(inner["state"])


def test_states_are_gathered_where_they_are_asked_for():
    names = sorted(raw_model().state_dict())
    results = run_ranks(gather_states, 4)
    for rank, (everywhere, again, first, partial, inner) in enumerate(results):
        part = ("first", "second")[rank % 2]
        assert sorted(everywhere) == names
        close(again, everywhere)
        assert first == (names if rank == 0 else []), "global rank 0 alone"
        assert partial == ["_smp_is_partial", f"{part}.bias", f"{part}.weight"]
        assert inner == [0, 1], "the inner optimizer knows the parameters of its rank alone"


def train_on_the_sum():
    start()
    model = smp.DistributedModel(raw_model(), average_grads_across_microbatches=False)
    smp.step(train_step)(model, *data())
    return gradients(model)


def test_gradients_may_be_sums_over_microbatches():
    expected = {name: 2 * gradient for name, gradient in plain_gradients(0).items()}
    close(merged(run_ranks(train_on_the_sum, 2)), expected)
