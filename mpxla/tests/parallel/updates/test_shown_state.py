"""`optimizer.state` that scripts read and change by parameters of the model, as in plain torch."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STAGES = {"pipeline_parallel_degree": 2}
DIVIDED = {"ddp": True, "shard_optimizer_state": True}
SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}


def read_all(net, optimizer):
    for parameter in net.parameters():
        optimizer.state[parameter].get("exp_avg")


def pop_one(net, optimizer):
    optimizer.state.pop(net[2].weight, None)


def delete_one(net, optimizer):
    with contextlib.suppress(KeyError):  # of a saved state that has none
        del optimizer.state[net[0].weight]


def zero_moments(net, optimizer):
    for parameter in net.parameters():
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"].zero_()


def set_one(net, optimizer):
    optimizer.state[net[2].weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.linspace(-1, 1, 640, dtype=torch.float64).view(8, 80),
        "exp_avg_sq": torch.linspace(0.1, 1, 640, dtype=torch.float64).view(8, 80),
    }


def forget_all(net, optimizer):
    optimizer.state.clear()


def put_back(net, optimizer):
    """What a copy has, in the place of what is there."""
    copied = copy.copy(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(copied)
    optimizer.state = copy.copy(optimizer.state)


CHANGES = (read_all, pop_one, delete_one, zero_moments, set_one, forget_all, put_back)


def made(is_plain):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    model = net if is_plain else smp.DistributedModel(net)
    return net, model, optimizer if is_plain else smp.DistributedOptimizer(optimizer)


def run(model, optimizer, is_plain, numbers):
    def step(model, x):
        loss = model(x).square().mean()
        loss.backward() if is_plain else model.backward(loss)
        return loss

    step = step if is_plain else smp.step(step)
    for number in numbers:
        optimizer.zero_grad()
        step(model, torch.linspace(-1, number, 16, dtype=torch.float64).view(4, 4))
        optimizer.step()


def trained(change, is_plain):
    """A change between steps, and the same one to a state that is loaded before the first step."""
    net, model, optimizer = made(is_plain)
    run(model, optimizer, is_plain, range(2))
    change(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, is_plain, range(2, 4))
    values, before = host(model.state_dict().items()), moments(saved)
    net, model, optimizer = made(is_plain)
    optimizer.load_state_dict(saved)
    change(net, optimizer)
    again = moments(optimizer.state_dict())
    run(model, optimizer, is_plain, range(2))
    return values, host(model.state_dict().items()), before, again


def moments(state):
    return host((at, entry["exp_avg"].clone()) for at, entry in state["state"].items())


def all_trained(config, changes):
    smp.init({"microbatches": 1, **config})
    return [trained(change, is_plain=False) for change in changes]


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [
        (STAGES, 2),
        (DIVIDED, 2),
        pytest.param(SHARDED, 2, marks=pytest.mark.slow),
        pytest.param({}, 1, marks=pytest.mark.slow),
    ],
    ids=["stages", "divided", "sharded", "one"],
)
def test_state_that_scripts_read_and_change_is_that_of_plain_torch(config, num_ranks):
    wanted = [trained(change, is_plain=True) for change in CHANGES]
    for found in run_ranks(all_trained, num_ranks, config, CHANGES):
        for change, got, expected in zip(CHANGES, found, wanted, strict=True):
            for values, others in zip(got, expected, strict=True):
                torch.testing.assert_close(values, others, msg=change.__name__)


def asked_elsewhere():
    smp.init({"microbatches": 1, "pipeline_parallel_degree": 2})
    net, model, optimizer = made(is_plain=False)
    run(model, optimizer, False, range(1))
    found = []
    for name, parameter in net.named_parameters():
        try:
            optimizer.state[parameter]["exp_avg"]
        except KeyError as error:
            found.append((name, str(error)))
    return found


def test_state_of_another_rank_is_an_error_that_names_the_parameter():
    texts = [text for of_rank in run_ranks(asked_elsewhere, 2) for text in of_rank]
    assert len(texts) == 6
    name, text = texts[-1]
    assert text.startswith(
        f"optimizer.state has no 'exp_avg' of {name!r} on this rank: another one updates that "
        f"parameter."
    )
