"""Models that are created without memory, trained and resumed over several ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.checkpoint.worlds import Run, TiedNet
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks


def error_of(action):
    try:
        action()
    except (smp.MpxlaError, RuntimeError) as error:
        return str(error)
    return None


def delayed_net(dropout):
    with smp.delay_param_initialization():
        return TiedNet(dropout)


def created_net(dropout):
    with smp.model_creation(dtype=torch.float32, flash_attention=True):
        return TiedNet(dropout)


def train(build, stages, replicas, **config):
    run = Run(stages=stages, replicas=replicas, build=build, **config)
    is_meta = [p.device.type for p in run.model.parameters()].count("meta")
    early = error_of(run.model.state_dict) if stages > 1 else ""
    losses = run.train(2)
    return is_meta, early, losses, torch.rand(1).item()


def train_in_every_way():
    ways = [(TiedNet, {}), (delayed_net, {}), (created_net, {})]
    ways.append((TiedNet, {"delayed_parameter_initialization": True}))
    results = []
    for build, config in ways:
        results.append(train(build, 2, 1, **config))
        smp.shutdown()
    return results


def test_a_delayed_model_trains_as_the_ordinary_one():
    for plain, *delayed in run_ranks(train_in_every_way, 2, timeout_s=120):
        assert plain[0] == 0 and plain[1] is None
        for num_meta, early, losses, drawn in delayed:
            assert num_meta == 2, "the two large ones"
            assert "and first.weight has no values yet" in early
            assert (losses, drawn) == plain[2:], "bitwise"


def load_delayed(path):
    run = Run(stages=2, build=delayed_net, seed=50)
    content = run.resume(path)
    resumed = run.train(1)
    state = run.model.state_dict()
    smp.shutdown()
    run = Run(stages=2, build=delayed_net, seed=51)
    wrong = {**state, "first.weight": torch.ones(3)}
    error = error_of(lambda: run.model.load_state_dict(wrong))
    run.model.load_state_dict(state)
    run.number = content["number"] + 1
    return content["number"], resumed, run.train(1), error


def save_ordinary(path):
    run = Run(stages=1)
    run.train(1)
    run.save(path, "one")
    return run.train(2)


@pytest.mark.slow
def test_a_delayed_model_takes_values_of_checkpoints_and_state_dicts(tmp_path):
    (expected,) = run_ranks(save_ordinary, 1, str(tmp_path))
    for number, resumed, loaded, error in run_ranks(load_delayed, 2, str(tmp_path), timeout_s=120):
        assert number == 1
        assert resumed == pytest.approx(expected[:1], rel=2e-5)
        assert loaded == pytest.approx(expected[1:], rel=2e-5)
        assert "size mismatch for first.weight" in error


def replicas_and_one_stage():
    smp.init({"ddp": True, "pipeline_parallel_degree": 1})
    torch.manual_seed(smp.rank())
    model = smp.DistributedModel(delayed_net(0.0))
    return {n: p.detach().cpu() for n, p in model.local_named_parameters()}


def test_replicas_take_the_values_of_the_first():
    one, other = run_ranks(replicas_and_one_stage, 2)
    torch.manual_seed(0)
    expected = dict(TiedNet().named_parameters())
    for name, value in one.items():
        assert torch.equal(value, expected[name]) and torch.equal(value, other[name])


def changed_afterwards(dropout):
    net = delayed_net(dropout)
    nn.init.zeros_(net.first.weight)
    return net


def wrong_uses():
    errors = {}
    smp.init({"pipeline_parallel_degree": 1})
    wrong = {"zero": {"zero_init": True}, "name": {"dtyp": 1}}
    for name, arguments in wrong.items():
        with_block = smp.model_creation(**arguments)
        errors[name] = error_of(with_block.__enter__)
    errors["changed"] = error_of(lambda: smp.DistributedModel(changed_afterwards(0.0)))
    return errors


def test_wrong_use_is_told():
    (errors,) = run_ranks(wrong_uses, 1)
    assert "the key sharded_data_parallel_degree switches on" in errors["zero"]
    assert "smp.model_creation has no setting 'dtyp' here" in errors["name"]
    assert "first.weight was changed after the block" in errors["changed"]


# --- memory -------------------------------------------------------------------------------------

WIDTH, DEPTH = 1024, 24  # 4 MiB a layer, 96 MiB in all


class Deep(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, ids):
        return self.head(torch.tanh(self.layers(self.embedding(ids))))


def delayed_deep(dropout):
    with smp.delay_param_initialization():
        return Deep(dropout)


def resident_mib(name):
    """Resident memory of this process (VmRSS), or its peak (VmHWM)."""
    (kib,) = re.findall(
        rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(kib) / 1024


def start_anew():
    """Lets the peak be what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib(build):
    """Growth of the peak of resident memory while a session starts and the model is built."""
    for _ in range(2):  # what a device needs once, before and after it is there
        Run(stages=2)
        smp.shutdown()
    start_anew()
    before = resident_mib("VmRSS")
    run = Run(stages=2, build=build, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    built = resident_mib("VmHWM")
    run.train(1)
    local = sum(p.nbytes for p in run.model.local_parameters()) / 2**20
    return built - before, local


def growth_mib():
    """Growth of resident memory while a delayed model is there."""
    start_anew()
    before = resident_mib("VmRSS")
    model = delayed_deep(0.0)
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    return resident_mib("VmHWM") - before


def test_building_takes_the_memory_of_one_tensor():
    """Not of 24, though each draws random numbers."""
    (grown,) = run_ranks(growth_mib, 1)
    assert grown < 24


@pytest.mark.slow
def test_a_rank_never_holds_the_model():
    for ordinary, delayed in zip(
        run_ranks_unpooled(peak_mib, 2, Deep, timeout_s=200),
        run_ranks_unpooled(peak_mib, 2, delayed_deep, timeout_s=200),
        strict=True,
    ):
        assert ordinary.value[0] > 90
        assert delayed.value[0] < 30
        assert 30 < delayed.value[1] < 70, "its share"
