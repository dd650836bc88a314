"""Any topology to any topology, and what each rank needs for it."""

import ctypes

import pytest
import torch

import mpxla as smp
from mpxla.tests.checkpoint.worlds import Run, one_of
from mpxla.tests.parallel.test_creation import Deep, resident_mib, start_anew
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

TOPOLOGIES = {
    "one": {"stages": 1},
    "pp2": {"stages": 2},
    "virtual": {"stages": 2, "virtual_pipeline_degree": 2},
    "dp2": {"stages": 1, "replicas": 2},
    "sharded": {"stages": 1, "replicas": 2, "shard_optimizer_state": True},
    "pp4": {"stages": 4},
    "pp2 dp2 sharded": {"stages": 2, "replicas": 2, "shard_optimizer_state": True},
}


def num_ranks(topology):
    return topology["stages"] * topology.get("replicas", 1)


def save_in_mid_run(path, topology):
    run = Run(**topology)
    run.train(2)
    run.save(path, "two")
    return run.train(2)


def resume_each(paths, topology):
    results = {}
    for name, path in paths.items():
        run = Run(seed=91, **topology)
        run.resume(path)
        results[name] = run.train(2)
        smp.shutdown()
    return results


def mean_losses(losses):
    return torch.tensor(losses).mean(dim=0).tolist()


def test_topologies_go_on_from_others(tmp_path):
    paths = {name: str(tmp_path / name) for name in TOPOLOGIES}
    saved = {
        name: run_ranks(save_in_mid_run, num_ranks(topology), paths[name], topology)
        for name, topology in TOPOLOGIES.items()
    }
    (expected,) = saved["one"]
    for number, (name, topology) in enumerate(TOPOLOGIES.items()):
        others = one_of(paths, number, 3)
        results = run_ranks(resume_each, num_ranks(topology), others, topology, timeout_s=300)
        for other in others:
            losses = mean_losses([result[other] for result in results])
            assert losses == pytest.approx(expected, rel=2e-5), (other, name)


# --- memory -------------------------------------------------------------------------------------

STAGES = 4
SLACK_MIB = 24


def deep_run():
    run = Run(stages=STAGES, build=Deep)
    run.train(1)
    return run


def held_mib(run):
    state = run.optimizer.contents.entries()
    tensors = [*run.model.local_parameters(), *(p.value for p in state)]
    return sum(t.nbytes for t in tensors) / 2**20


def growth_mib(action):
    """Growth of the peak of resident memory, mapped files included."""
    smp.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would serve the action
    start_anew()
    before = resident_mib("VmRSS")
    action()
    return resident_mib("VmHWM") - before


def save_and_measure(path):
    run = deep_run()
    whole = sum(p.nbytes for p in run.model.parameters()) / 2**20
    saved = growth_mib(lambda: run.save(path, "share"))
    in_background = growth_mib(lambda: run.save(path, "share", asynchronous=True).wait())
    run.train(1)
    return saved, in_background, held_mib(run), whole


def resume_and_measure(path):
    run = deep_run()
    whole = sum(p.nbytes for p in run.model.parameters()) / 2**20
    return growth_mib(lambda: run.resume(path)), held_mib(run), whole


def test_no_rank_gathers_the_model(tmp_path):
    """To save, torch_xla copies what a rank holds twice; to load, files are mapped beside it.

    Who gathered the model would need all of it in addition.
    """
    ranks = run_ranks_unpooled(save_and_measure, STAGES, str(tmp_path), timeout_s=300)
    for saved, in_background, held, whole in (rank.value for rank in ranks):
        print(f"save {saved:.0f}, {in_background:.0f}; held {held:.0f} MiB, model {whole:.0f}")
        assert held < 1.2 * 3 * whole / STAGES
        assert max(saved, in_background) < 2 * held + SLACK_MIB < 2 * held + whole
    for loaded, held, whole in (
        rank.value
        for rank in run_ranks_unpooled(resume_and_measure, STAGES, str(tmp_path), timeout_s=300)
    ):
        print(f"load {loaded:.0f}; held {held:.0f}")
        assert loaded < 3 * held < 2 * held + whole
