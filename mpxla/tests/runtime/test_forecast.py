"""Predicted memory, links and programs against what two ranks really hold, send and compile."""

from collections import defaultdict

import pytest
import torch

import mpxla as smp
from mpxla.testing import run_ranks
from mpxla.tests.models import Gpt, predict_tokens, tokens

pytestmark = pytest.mark.ranks


def hold_and_predict(pipeline):
    from mpxla.graph.cost import MachineModel
    from mpxla.runtime.buffers import LiveValues
    from mpxla.runtime.forecast import forecast
    from mpxla.session import current

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": pipeline})
    torch.manual_seed(1)
    model = smp.DistributedModel(Gpt())
    step = smp.step(predict_tokens)
    step(model, tokens(8))
    sizes: dict[int, list[int]] = defaultdict(list)
    held: dict[tuple[int, int], int] = {}
    peak = 0
    save, restore = LiveValues.save, LiveValues.restore
    fixed = {id(p) for p in model.local_parameters()} | {id(b) for b in model.local_buffers()}
    fixed |= {id(t) for plan in model._engine.calls.plans for t in plan.runner._constants.values()}

    def counting_save(values, stage, microbatch, saved):
        nonlocal peak
        unique = {id(t): t.numel() * t.itemsize for t in saved if id(t) not in fixed}
        sizes[stage].append(sum(unique.values()))
        held[stage, microbatch] = sum(unique.values())
        peak = max(peak, sum(held.values()))
        save(values, stage, microbatch, saved)

    def counting_restore(values, stage, microbatch):
        held.pop((stage, microbatch))
        return restore(values, stage, microbatch)

    LiveValues.save, LiveValues.restore = counting_save, counting_restore
    try:
        step(model, tokens(8))
    finally:
        LiveValues.save, LiveValues.restore = save, restore
    found = forecast(
        model._engine.first_cut, current().config, MachineModel(), current().backend.lowering
    )
    programs = [p.name for p in found.programs if p.rank == smp.pp_rank()]
    (plan,) = (known.runner for known in model._engine.calls.plans)
    compiled = [e.name for s in plan.plan.programs.values() for e in s.programs]
    cut = found.cut
    seen = [
        count * load.activation_bytes
        for count, load in zip(cut.in_flight, cut.partition.loads, strict=True)
    ]
    return dict(sizes), peak, found.costs, found.activation_bytes, seen, (programs, compiled)


@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_predicted_memory_and_programs_are_the_real_ones(pipeline):
    results = run_ranks(hold_and_predict, 2, pipeline, timeout_s=120)
    for rank, result in enumerate(results):
        sizes, peak, costs, activations, seen_by_partitioner, (programs, compiled) = result
        for stage, seen in sizes.items():
            expected = {costs.saved_bytes[stage]}
            if pipeline == "zero_bubble":
                expected.add(costs.kept_bytes[stage])
            assert set(seen) == expected, f"stage {stage}"
        if pipeline == "interleaved":
            assert peak == activations[rank] == seen_by_partitioner[rank]
        else:  # a prediction counts both sets while input gradients are computed
            assert peak <= activations[rank] <= peak + costs.kept_bytes[rank]
        assert programs == compiled
