"""Checkpoints of 16-bit parameters with float32 masters, under other topologies and precisions."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_parity_masters import (
    BF16,
    Case,
    Net,
    adamw,
    batch,
    masters_of,
    start,
    train_step,
    update,
)
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks
ZERO, PIPELINE = Case(Net, 2, 1, is_sharded=True), Case(Net, 1, 2)


def begin(case, dtype=BF16):
    model = start(case, Net().to(dtype), has_masters=dtype is BF16)
    return model, smp.DistributedOptimizer(adamw(Net, model.parameters()))


def exact(model, optimizer):
    """What is updated, by name: masters, or parameters of 32 bits."""
    state = model.state_dict()
    return state if next(iter(state.values())).dtype is torch.float32 else masters_of(
        model, optimizer
    )  # fmt: skip


def save(path, case, dtype):
    """Trains 3 steps, saves, and trains one more."""
    model, optimizer = begin(case, dtype)
    for number in range(3):
        update(case, model, optimizer, number)
    smp.save_checkpoint(path, "third", model=model, optimizer=optimizer)
    found = exact(model, optimizer)
    update(case, model, optimizer, 3)
    return found, exact(model, optimizer)


def resume(path, case, dtype):
    """What is updated after loading, and after one more step."""
    model, optimizer = begin(case, dtype)
    smp.resume_from_checkpoint(path, "third")
    if case.stages > 1:
        evaluate(model, torch.ones(2, 24, dtype=dtype))  # partitions, and loads
    found = exact(model, optimizer), model.state_dict()
    if dtype is BF16:
        update(case, model, optimizer, 3)
    return *found, exact(model, optimizer)


@smp.step
def evaluate(model, x):
    return model(x)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((ZERO, BF16), (ZERO, BF16), marks=pytest.mark.slow),
        ((ZERO, BF16), (PIPELINE, BF16)),
        pytest.param((ZERO, BF16), (PIPELINE, torch.float32), marks=pytest.mark.slow),
        pytest.param((PIPELINE, BF16), (ZERO, torch.float32), marks=pytest.mark.slow),
        pytest.param((PIPELINE, BF16), (ZERO, BF16), marks=pytest.mark.slow),
        # Weights of 32 bits become masters as they are.
        pytest.param((PIPELINE, torch.float32), (ZERO, BF16), marks=pytest.mark.slow),
    ],
    ids=["same", "other topology", "float32", "float32 divided", "divided", "from float32"],
)
def test_what_is_updated_is_loaded_to_the_last_bit(tmp_path, saved, loaded):
    expected = run_ranks(save, 2, str(tmp_path), *saved)[0]
    for found, state, after in run_ranks(resume, 2, str(tmp_path), *loaded):
        for name, value in expected[0].items():
            assert torch.equal(found[name], value), name
            assert torch.equal(state[name], value.to(loaded[1])), name
            if saved == loaded:
                assert torch.equal(after[name], expected[1][name]), name


SCALED = {"ddp": True, "fp16": True}
SCALED_ZERO = {**SCALED, "shard_optimizer_state": True}
SCALED_STAGES = {**SCALED, "pipeline_parallel_degree": 2}


def begin_scaled(config):
    smp.init(config)
    model = smp.DistributedModel(Net())
    settings = {"init_scale": 64.0, "scale_window": 3}
    optimizer = smp.DistributedOptimizer(
        adamw(Net, model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=settings
    )
    return model, optimizer


def update_scaled(model, optimizer, number):
    """Only the second update overflows, on the first replica."""
    x = batch(number, 8, torch.float32)
    if number == 1:
        x[0] = 1e6
    optimizer.zero_grad()
    train_step(model, x.chunk(smp.rdp_size())[smp.rdp_rank()])
    optimizer.step()
    return masters_of(model, optimizer), optimizer.loss_scale


def save_scaled(path, config):
    model, optimizer = begin_scaled(config)
    found = [update_scaled(model, optimizer, number) for number in range(4)]
    smp.save_checkpoint(path, "fourth", model=model, optimizer=optimizer)
    states = model.state_dict(), optimizer.state_dict()
    return found[-1], update_scaled(model, optimizer, 4), states


def resume_scaled(path, config, states):
    """From a checkpoint, or from the state dicts."""
    model, optimizer = begin_scaled(config)
    if states is None:
        smp.resume_from_checkpoint(path, "fourth")
    else:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    if smp.pp_size() > 1:
        evaluate(model, torch.ones(2, 24))  # partitions, and loads
    before = masters_of(model, optimizer), optimizer.loss_scale
    return before, update_scaled(model, optimizer, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "has_files"),
    [
        (SCALED_ZERO, SCALED_ZERO, True),
        (SCALED_ZERO, SCALED_STAGES, True),
        (SCALED_STAGES, SCALED_ZERO, False),
    ],
    ids=["same", "stages", "state-dicts"],
)
def test_a_loss_scale_goes_on_as_without_the_restart(tmp_path, saved, loaded, has_files):
    results = run_ranks(save_scaled, 2, str(tmp_path), saved)
    (masters, scale), (after, scale_after), states = results[0]
    assert (scale, scale_after) == (32.0, 64.0), "it grows after three good steps"
    given = None if has_files else states
    for before, again in run_ranks(resume_scaled, 2, str(tmp_path), loaded, given):
        assert (before[1], again[1]) == (32.0, 64.0)
        for name, value in masters.items():
            assert torch.equal(before[0][name], value), name
            if saved == loaded:
                assert torch.equal(again[0][name], after[name]), name


def save_full(path, case, dtype, file_dtypes):
    """Trains 3 steps, and saves full checkpoints in several types."""
    model, optimizer = begin(case, dtype)
    for number in range(3):
        update(case, model, optimizer, number)
    for number, file_dtype in enumerate(file_dtypes):
        smp.save_checkpoint(path, str(number), partial=False, model=model, dtype=file_dtype)
    return exact(model, optimizer), model.state_dict()


def resume_full(path, case, dtype, tag):
    model, optimizer = begin(case, dtype)
    smp.resume_from_checkpoint(path, tag, partial=False)
    evaluate(model, torch.ones(2, 24, dtype=dtype))  # partitions, and loads
    return exact(model, optimizer), model.state_dict()


F32 = torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((ZERO, BF16), (PIPELINE, F32)),
        ((PIPELINE, F32), (ZERO, BF16)),
    ],
    ids=["zero1-to-float32", "float32-to-zero1"],
)
def test_full_checkpoints_in_either_type(tmp_path, saved, loaded):
    results = run_ranks(save_full, 2, str(tmp_path), *saved, (None, F32, BF16))
    masters, state = results[0]
    own, wide, narrow = (torch.load(tmp_path / tag) for tag in "012")
    assert list(own) == list(wide) == list(narrow) == list(state)
    for name, master in masters.items():
        assert torch.equal(own[name], state[name]) and own[name].dtype is saved[1]
        assert torch.equal(wide[name], master) and wide[name].dtype is F32
        assert torch.equal(narrow[name], master.to(BF16)) and narrow[name].dtype is BF16
    assert any(not torch.equal(wide[name], narrow[name].float()) for name in masters)
    for tag, source in (("1", wide), ("2", narrow)):
        for found, values in run_ranks(resume_full, 2, str(tmp_path), *loaded, tag):
            for name, value in source.items():
                assert torch.equal(found[name], value.float()), (tag, name)
                assert torch.equal(values[name], value.to(loaded[1])), (tag, name)


def ask_wrongly(path, partial, dtype):
    model, _ = begin(Case(Net))
    evaluate(model, torch.ones(2, 24, dtype=BF16))
    return refused(
        lambda: smp.save_checkpoint(path, "x", partial=partial, model=model, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("partial", "dtype", "text"),
    [
        (True, F32, "dtype=torch.float32 goes with partial=False only: a partial checkpoint keeps"),
        (False, torch.int8, "dtype is torch.int8; give torch.float32, torch.bfloat16 or"),
    ],
    ids=["partial", "integers"],
)
def test_types_that_no_checkpoint_has(tmp_path, partial, dtype, text):
    results = run_ranks(ask_wrongly, 1, str(tmp_path), partial, dtype)
    check_texts(results, smp.CheckpointError, text)


class Tower(nn.Module):
    """Layers of which the first is frozen at the start."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.enter, self.leave = nn.Linear(24, 4), nn.Linear(4, 2)
        self.enter.requires_grad_(False)

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x))).float().square().mean()


def thaw_and_load():
    """A parameter that is thawed later, and a state dict in between."""
    case = Case(Net)
    model = start(case, Tower().to(BF16))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-14))
    update(case, model, optimizer, 0)
    num_wide = [sum(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"])]
    model.module.enter.requires_grad_(True)
    before = model.store.state.parameters["enter.weight"].detach().clone()
    for number in range(1, 5):
        update(case, model, optimizer, number)
    num_wide.append(sum(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"]))
    moved = model.store.owner("enter.weight").detach() - before.float()
    weights = model.state_dict()
    weights["leave.bias"] = torch.tensor([1.0 + 2.0**-14, 3.0])
    model.load_state_dict(weights)
    kept = model.store.owner("enter.weight").detach() - before.float()
    return num_wide, moved, kept, model.store.owner("leave.bias").detach()


def test_thawed_parameters_get_masters_and_loading_keeps_low_bits():
    ((num_wide, moved, kept, bias),) = run_ranks(thaw_and_load, 1)
    assert num_wide == [2, 4]
    assert moved.any() and torch.equal(moved, kept), "values that are the same change no master"
    assert bias.tolist() == [1.0 + 2.0**-14, 3.0]


def thaw_and_clip():
    """The norm of gradients in the step in which a parameter is thawed, and that by hand."""
    smp.init({"fp16": True})
    model = smp.DistributedModel(Tower())
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = smp.DistributedOptimizer(plain, static_loss_scale=64.0)
    x = batch(0, 8, torch.float32)
    train_step(model, x)
    optimizer.step()
    model.module.enter.requires_grad_(True)
    optimizer.zero_grad()
    train_step(model, x)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    raw = Tower()
    raw.enter.requires_grad_(True)
    raw.load_state_dict(model.state_dict())
    raw(x).backward()
    return norm.item(), torch.nn.utils.clip_grad_norm_(raw.parameters(), 1e9).item()


def test_the_loss_scale_is_taken_off_thawed_parameters_before_clipping():
    ((norm, expected),) = run_ranks(thaw_and_clip, 1)
    assert abs(norm - expected) < 0.02 * expected
