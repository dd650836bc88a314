"""Predicted memory, links and programs against what two ranks really hold, send and compile."""

from collections import defaultdict

import pytest
import torch

import mpxla as smp
from mpxla.tests.models import Gpt, predict_tokens, tokens
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def hold_and_predict(pipeline):
    from mpxla.graph.cost import MachineModel
    from mpxla.runtime.buffers import LiveValues
    from mpxla.runtime.plans.forecast import forecast
    from mpxla.session import current

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": pipeline})
    torch.manual_seed(1)
    model = smp.DistributedModel(Gpt())
    step = smp.step(predict_tokens)
    step(model, tokens(8))
    sizes: dict[int, list[int]] = defaultdict(list)
    save = LiveValues.save
    held = current().backend.adopt([*model.local_parameters(), *model.local_buffers()])
    (plan,) = (known.runner for known in model._engine.calls.plans)
    read = [constant.buffer for constant in plan._read.values()]
    fixed = {id(t) for t in (*held, *read, *plan._objective_seeds[1].values())}

    def counting_save(values, stage, microbatch, saved, own):
        unique = {id(t): t.nbytes for t in saved if id(t) not in fixed}
        sizes[stage].append(sum(unique.values()))
        save(values, stage, microbatch, saved, own)

    LiveValues.save = counting_save
    try:
        step(model, tokens(8))
    finally:
        LiveValues.save = save
    peak = model.last_run.values.peak_saved_bytes
    found = forecast(
        model._engine.first_cuts[model.label],
        current().config,
        MachineModel(),
        current().backend.lowering,
    )
    programs = [p.name for p in found.programs if p.rank == smp.pp_rank()]
    compiled = [e.name for s in plan.plan.programs.values() for e in s.programs]
    cut = found.cut
    seen = [
        count * load.activation_bytes
        for count, load in zip(cut.in_flight, cut.partition.loads, strict=True)
    ]
    return dict(sizes), peak, found.costs, found.activation_bytes, seen, (programs, compiled)


@pytest.mark.parametrize(
    "pipeline", ["interleaved", pytest.param("zero_bubble", marks=pytest.mark.slow)]
)
def test_predicted_memory_and_programs_are_the_real_ones(pipeline):
    results = run_ranks(hold_and_predict, 2, pipeline, timeout_s=120)
    for rank, result in enumerate(results):
        sizes, peak, costs, activations, seen_by_partitioner, (programs, compiled) = result
        for stage, seen in sizes.items():
            expected = {costs.held[stage].saved}
            if pipeline == "zero_bubble":
                expected.add(costs.held[stage].kept)
            assert set(seen) == expected, f"stage {stage}"
        assert peak == activations[rank]
        if pipeline == "interleaved":
            assert peak == seen_by_partitioner[rank]
        assert programs == compiled
