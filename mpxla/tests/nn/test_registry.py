"""Classes that take the place of others, and marks on modules as they are built."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import ConfigError
from mpxla.nn import registry
from mpxla.nn.distribute import exchange_registered
from mpxla.nn.plans import units_of
from mpxla.tests.nn.in_threads import distributed, in_threads, lower, train_once

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def make_block():
    class Block(nn.Module):
        """Takes x by name, and gives it in a dict."""

        def __init__(self, width, *, inner=8):
            super().__init__()
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x, scale=1.0):
            return {"x": self.down(self.up(x).relu()) * scale}

    return Block


def init_hook(width, *, inner=8):
    return (width, inner), {"hidden_dropout_prob": 0.0, "activation": "relu"}


def forward_hook(x, scale=1.0):
    return (x * scale,), {}


def return_hook(result):
    return {"x": result}


def model_of(kind, count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(kind(4, inner=8) for _ in range(count)))


def loss_of(model, x):
    for block in model:
        x = block(x, scale=2.0)["x"]
    return x.square().sum()


def test_a_registered_class_takes_the_place_of_another():
    block = make_block()
    hooks = init_hook, forward_hook, return_hook
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerOutputLayer, *hooks)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    ranks = distributed(lambda: model_of(block), 2)
    new = ranks[0].model[1]
    assert isinstance(new, smp.nn.DistributedTransformerOutputLayer)
    assert (new.dense1.weight.shape, new.activation) == ((4, 4), "relu")
    assert set(ranks[0].shards) == {
        f"{i}.{n}" for i in (0, 1) for n in ("dense1.weight", "dense1.bias", "dense2.weight")
    }
    whole = exchange_registered(marked(model_of(block)))
    values = [dict(rank.model.named_parameters()) for rank in ranks]
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parts = [of_rank[name] for of_rank in values]
            shard = ranks[0].shards.get(name)
            parameter.copy_(parts[0] if shard is None else shard.join(parts))
    loss = loss_of(whole, x)
    programs = [lower(rank, loss_of, [x]) for rank in ranks]
    (found, _), _ = in_threads(train_once, ranks, programs, [[x]] * 2)
    torch.testing.assert_close(found, loss.detach())


def marked(model, **settings):
    smp.set_tensor_parallelism(model, **settings)
    return model


def test_settings_win_over_the_hook():
    block = make_block()
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerOutputLayer, init_hook)
    new = exchange_registered(marked(model_of(block), activation="gelu", fused_softmax=True))
    assert new[0].activation == "gelu"
    model = model_of(block)
    smp.set_tensor_parallelism(model[0], False)
    new = exchange_registered(marked(model))
    assert type(new[0]) is block, "the innermost switch counts"
    assert type(new[1]) is not block


def test_the_decorator_and_the_whole_model():
    class Own(smp.nn.DistributedModule):
        def __init__(self, width):
            super().__init__()
            self.width = width

    @smp.tp_register(Own)
    class Plain(nn.Module):
        def __init__(self, width):
            super().__init__()

    class Below(Plain):
        pass

    new = exchange_registered(marked(Plain(width=3)).eval())
    assert isinstance(new, Own) and new.width == 3 and not new.training
    assert type(exchange_registered(marked(Below(3)))) is Below, "only the class itself"
    assert type(exchange_registered(Plain(3))) is Plain, "only where it is switched on"


def test_modules_are_marked_as_they_are_built():
    block = make_block()
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerOutputLayer, init_hook)
    with smp.tensor_parallelism():
        first = block(4)
        with smp.tensor_parallelism(False), smp.partition(1):
            second = block(4)
        third = block(4)
    new = exchange_registered(nn.Sequential(first, second, third, block(4)))
    assert [type(part) is block for part in new] == [False, True, False, True]
    assert vars(second)["_mpxla_partition"] == 1
    assert "_mpxla_partition" not in vars(third)
    assert nn.Module.__init__.__name__ == "__init__", "as torch has it"


def test_what_is_shared_stays(caplog):
    block = make_block()
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerOutputLayer, init_hook)
    model = model_of(block)
    model[1].up.weight = model[0].up.weight
    new = exchange_registered(marked(model))
    assert [type(part) is block for part in new] == [True, True]
    assert "shares 0.up.weight with the rest of the model" in caplog.text


def test_a_model_without_values_is_split():
    """Blocks of `model_creation`: values are those that the model would have had."""

    class Wide(nn.Module):
        _tp_plan = {"up": "colwise", "down": "rowwise"}

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def build():
        torch.manual_seed(6)
        with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
            model = Wide()
        assert model.up.weight.is_meta
        return model

    torch.manual_seed(6)
    whole = Wide().double()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    whole = Wide()
    torch.set_default_dtype(torch.float32)
    ranks = distributed(build, 2, is_marked=False)
    for name, parameter in whole.named_parameters():
        parts = [dict(rank.model.named_parameters())[name] for rank in ranks]
        shard = ranks[0].shards.get(name)
        joined = parts[0] if shard is None else shard.join(parts)
        assert torch.equal(joined, parameter), name
    assert not units_of(ranks[0].model.up, 2)


class Own(smp.nn.DistributedModule):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        ({"init_hook": lambda *a, **k: 3}, "the init_hook of Block returned int; it has to return"),
        (
            {"init_hook": lambda *a, **k: ((), [])},
            r"the init_hook of Block returned tuple of 2; it has to return \(args, kwargs\)",
        ),
        (
            {"init_hook": lambda *a, **k: ((1, 2), {})},
            "Own, which takes the place of Block .0., cannot be built of what init_hook gives",
        ),
        (
            {"init_hook": lambda *a, **k: ((), {}), "forward_hook": lambda x, scale: x},
            "the forward_hook of Block returned Tensor; it has to return",
        ),
        (
            {
                "init_hook": lambda *a, **k: ((), {}),
                "forward_hook": lambda x, scale: ((x,), {}),
                "return_hook": lambda result: None,
            },
            "the return_hook of Block returned None; it has to return what Block.forward would",
        ),
    ],
)
def test_hooks_that_return_the_wrong_things(hooks, text):
    block = make_block()
    smp.tp_register_with_module(block, Own, **hooks)
    with pytest.raises(ConfigError, match=text):
        loss_of(exchange_registered(marked(model_of(block))), torch.zeros(2, 4))


def test_wrong_registrations():
    block = make_block()
    with pytest.raises(ConfigError, match=r"is no subclass of smp.nn.DistributedModule"):
        smp.tp_register(nn.Linear)(block)
    with pytest.raises(ConfigError, match="3 is no class of modules"):
        smp.tp_register_with_module(3, Own)
    with pytest.raises(ConfigError, match="init_hook is no function"):
        smp.tp_register_with_module(block, Own, init_hook=3)
    early = marked(model_of(block))
    smp.tp_register_with_module(block, Own)
    with pytest.raises(ConfigError, match=r"0 is a Block that was built before smp.tp_register"):
        exchange_registered(early)
    with pytest.raises(ConfigError, match=r"smp.tensor_parallelism has no setting 'colour'"):
        smp.tensor_parallelism(colour=1).__enter__()
