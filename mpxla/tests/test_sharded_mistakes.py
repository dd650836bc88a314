"""Sharded data parallelism: mistakes that would change numbers in silence are told.

And habits that are none.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from mpxla.tests.ranks.run import RankError, run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks

CONFIG = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 16,
    "sdp_gradient_clipping": 1e9,
}
JAX = {"MPXLA_DEVICE": "pjrt"}


class Sides(nn.Module):
    """Two layers of one shape, of which a call takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, side):
        return self.left(x) if side == "left" else self.right(x)


def make_step():
    """The step function of cases whose errors do not name it."""
    import mpxla as smp

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return step


def take_other_sides():
    """Runs on every rank: texts of errors, and losses of a call after them."""
    import mpxla as smp

    smp.init(CONFIG)
    model, x = smp.DistributedModel(Sides()), torch.ones(2, 4)
    own = ("left", "right")[smp.rank()]

    @smp.step
    def evaluate(model, x, side):
        return model(x, side).square().mean()

    texts = []
    for known in ((), ("left",), ("right",)):  # with no plan, one on the first rank, one on both
        for side in known:
            evaluate(model, x, side)
        with pytest.raises(smp.RankMismatch) as error:
            evaluate(model, x, own)
        texts.append(str(error.value))
    return texts, [evaluate(model, x, side).reduce_mean().item() for side in ("left", "right")]


def test_ranks_that_gather_other_parameters():
    model, x = Sides(), torch.ones(2, 4)
    expected = [model(x, side).square().mean().item() for side in ("left", "right")]
    for texts, losses in run_ranks(take_other_sides, 2, env=JAX):
        for text in texts:
            assert "ranks [1] gather or scatter other parameters in this call than rank 0" in text
            assert "gathers left.weight on rank 0\n" in text
            assert "gathers right.weight on rank 1\n" in text
            assert "arguments that lead to the same layers" in text
        assert losses == pytest.approx(expected, rel=1e-5)


def write_where_nothing_is():
    """Runs on every rank: texts of errors by what was done, and whether training goes on."""
    import mpxla as smp

    smp.init(CONFIG)
    torch.manual_seed(1)
    raw = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    start = {name: value.clone() for name, value in raw.state_dict().items()}
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    weight, values = raw[0].weight, nn.Linear(4, 4, bias=False).state_dict()
    step = make_step()
    nn.init.zeros_(weight)  # before anything has looked at it
    with pytest.raises(smp.StepError, match=r"0\.weight was written to after"):
        step(model, torch.ones(2, 4))
    model.load_state_dict(start)

    def run():
        step(model, torch.ones(2, 4))
        optimizer.step()

    def in_place():
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)

    def among_others():
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)

    mistakes = {
        "in place": in_place,
        "among others": among_others,
        "data": lambda: weight.data.clamp_(-0.1, 0.1),
        "detached": lambda: weight.detach().mul_(2),
        "dtype": model.half,
        "other data": lambda: setattr(weight, "data", torch.empty(4, 4, device="meta")),
        "module": lambda: raw[0].load_state_dict(values),
        "backward": lambda: weight.square().sum().backward(),
        "gradient": lambda: setattr(weight, "grad", torch.ones_like(weight)),
    }
    whole, texts = model.state_dict(), {}
    model.float()  # changes nothing
    for what, mistake in mistakes.items():
        run()
        with pytest.warns(UserWarning) if what == "module" else contextlib.nullcontext():
            mistake()
        for use in (run, optimizer.step, model.state_dict):
            with pytest.raises(smp.StepError) as error:
                use()
            texts.setdefault(what, set()).add(str(error.value))
        weight.grad = None
        model.load_state_dict(whole)
    run()
    return texts


@pytest.mark.slow
def test_what_is_lost_is_an_error():
    for texts in run_ranks(write_where_nothing_is, 2, env=JAX):
        assert len(texts) == 9
        for what, (text,) in texts.items():
            is_gradient = what in ("backward", "gradient")
            start = "has a gradient from outside" if is_gradient else "was written to after"
            assert text.startswith(f"the parameter 0.weight {start}"), what
            assert "model.load_state_dict" in text or "loss in the step function" in text


def leave_gradients():
    """Runs on every rank: by key that divides updates, an error's text and warnings."""
    import mpxla as smp
    from mpxla.parallel import store

    found = {}
    for key in ("shard_gradients", "shard_optimizer_state", "sharded_data_parallel_degree"):
        smp.init({**CONFIG, "sharded_data_parallel_degree": 1, key: 2 if "degree" in key else True})
        model = smp.DistributedModel(nn.Linear(4, 4, bias=False))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        step = make_step()

        def run(clear, step=step, model=model, optimizer=optimizer):
            with mock.patch.object(store, "warn_once") as warned:
                clear()
                step(model, torch.ones(2, 4))
                optimizer.step()
            return [call.args[1] for call in warned.mock_calls]

        def clear_by_hand(model=model):
            for parameter in model.parameters():
                parameter.grad = None

        inner = optimizer.optimizer
        clearings = [optimizer.zero_grad, model.zero_grad, inner.zero_grad]
        clearings += [lambda o=optimizer: o.zero_grad(set_to_none=False)]
        warnings = [run(clear) for clear in clearings]
        warnings.append(run(clear_by_hand))
        (parameter,) = model.module.parameters()
        parameter.grad = torch.ones_like(parameter)
        if "degree" in key:
            with pytest.raises(smp.StepError) as error:
                optimizer.step()
            found[key] = str(error.value), warnings
        else:
            assert not any(warnings)  # assigned gradients count, see test_divided_gradients
            optimizer.step()
        smp.shutdown()
    return found


@pytest.mark.slow
def test_gradients_of_parameters_that_optimizers_do_not_hold():
    for found in run_ranks(leave_gradients, 2, env=JAX):
        for text, warnings in found.values():
            assert text.startswith("the parameter weight has a gradient from outside of step")
            assert warnings == [[]] * 5


def train_by_adagrad():
    """Runs on every rank: whole weights and state of an optimizer that makes state at once."""
    import mpxla as smp

    smp.init(CONFIG)
    torch.manual_seed(5)
    model = smp.DistributedModel(nn.Linear(4, 5))
    inner = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5)
    optimizer = smp.DistributedOptimizer(inner)
    step = make_step()

    for _ in range(2):
        optimizer.zero_grad()
        step(model, torch.ones(2, 4))
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()["state"]


def test_an_optimizer_that_makes_its_state_at_once():
    torch.manual_seed(5)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    for weights, state in run_ranks(train_by_adagrad, 2, env=JAX):
        assert_close_by_norm(weights, model.state_dict(), 1e-5)
        for position, entry in optimizer.state_dict()["state"].items():
            assert_close_by_norm(state[position], entry, 1e-5)


def load(kind):
    """Runs on every rank: an error's text, or whether the model has what was loaded."""
    import mpxla as smp

    smp.init({**CONFIG, **({"pipeline_parallel_degree": 2} if kind == "stages" else {})})
    with smp.model_creation(zero_init=True) if kind == "delayed" else contextlib.nullcontext():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = smp.DistributedModel(module)
    step = make_step()

    def run():
        step(model, torch.ones(2, 4))

    if kind != "delayed":
        run()
    torch.manual_seed(7)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    model.load_state_dict(whole)
    run()
    is_equal = all(torch.equal(v.cpu(), whole[name]) for name, v in model.state_dict().items())
    smp.barrier()  # the error below comes to ranks that still gather, too
    whole["1.weight"] = whole["1.weight"].clone()
    whole["1.weight"][2, 1] += float(smp.rdp_rank())
    with pytest.raises((smp.RankMismatch, smp.PeerFailure)) as error:
        model.load_state_dict(whole)
    return is_equal, str(error.value)


@pytest.mark.parametrize(
    "kind, count",
    [("placed", 2), ("delayed", 2), pytest.param("stages", 4, marks=pytest.mark.slow)],
)
def test_values_to_load_that_differ_between_ranks(kind, count):
    for is_equal, text in run_ranks(load, count, kind, env=JAX):
        assert is_equal
        assert "give other values to model.load_state_dict than rank" in text
        assert "1.weight: float32[4, 4] with digest " in text
        assert "ranks [1] give" in text or count == 4
        assert "sharded_data_parallel_degree" in text and "smp.broadcast" in text


def load_alone():
    """Runs on every rank: only the first one loads values."""
    import mpxla as smp

    smp.init(CONFIG)
    model = smp.DistributedModel(nn.Linear(4, 4, bias=False))

    @smp.step
    def evaluate(model, x):
        return model(x).square().mean()

    evaluate(model, torch.ones(2, 4))
    if smp.rank() == 0:
        model.load_state_dict(nn.Linear(4, 4, bias=False).state_dict())
    evaluate(model, torch.ones(2, 4))


def test_one_rank_that_loads_alone_is_told_at_once():
    with pytest.raises(RankError) as error:
        run_ranks(load_alone, 2, timeout_s=60, env=JAX)
    assert "rank 0 came with model.load_state_dict() at " in str(error.value)


def gather_alone():
    """Runs on every rank: the first one gathers what the others hold, who go on training."""
    import mpxla as smp

    smp.init(CONFIG)
    model = smp.DistributedModel(nn.Linear(4, 4, bias=False))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(2, 4))
    if smp.rank() == 0:
        model.state_dict()
    step(model, torch.ones(2, 4))


def test_one_rank_that_gathers_alone_is_told_at_once():
    with pytest.raises(RankError) as error:
        run_ranks(gather_alone, 2, timeout_s=60, env=JAX)
    text = str(error.value)
    assert "timed out" not in text
    assert "rank 0 came with model.state_dict() at " in text
    assert "gather_alone.<locals>.step. Evaluate, save and log on all of them" in text
