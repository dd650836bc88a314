"""Names and storage of a model's parameters and buffers."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from mpxla.errors import MpxlaError, StepError
from mpxla.runtime.state import ModelState, load_into

pytestmark = pytest.mark.unit

# The real device is an XLA device; for storage any other device than the host's will do.
CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.norm
        self.register_buffer("table", torch.arange(2.0))
        self.register_buffer("nothing", None)
        self.head.register_buffer("table", self.table)


PARAMETERS = ["embedding.weight", "norm.weight", "norm.bias"]
BUFFERS = ["table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_every_tensor_has_one_canonical_name():
    state = ModelState(Tied())
    assert list(state.parameters) == PARAMETERS
    assert sorted(state.buffers) == sorted(BUFFERS)
    names = state.canonical_names
    assert names["head.weight"] == "embedding.weight"
    assert names["again.bias"] == "norm.bias"
    assert names["again.running_mean"] == "norm.running_mean"
    assert names["head.table"] == "table"
    assert names["norm.weight"] == "norm.weight"
    assert "nothing" not in names


def test_before_placing_everything_is_local():
    state = ModelState(Tied())
    assert not state.is_placed
    assert [name for name, _ in state.local_parameters()] == PARAMETERS


def test_garbage_that_refers_to_a_parameter_weakly_does_not_keep_it():
    module = Tied()
    garbage: list = [WeakIdRef(module.norm.weight)]
    garbage.append(garbage)
    del garbage
    ModelState(module).place([], CPU)
    assert module.norm.weight.is_meta


def test_weak_references_of_users_stay():
    module = Tied()
    found = weakref.ref(module.norm.weight)
    ModelState(module).place([], CPU)
    assert module.norm.weight.is_meta and found() is module.norm.weight


def test_what_keeps_something_for_a_tensor_is_an_error():
    module = Tied()
    kept = WeakIdKeyDictionary({module.norm.weight: "its value"})
    with pytest.raises(MpxlaError, match=r"norm\.weight cannot move to meta: .* weakref"):
        ModelState(module).place([], CPU)
    assert len(kept) == 1


def test_placing_keeps_identity_and_frees_the_rest():
    module = Tied()
    state = ModelState(module)
    kept, freed = module.embedding.weight, module.norm.weight
    value = kept.detach().clone()
    kept.grad = torch.ones_like(kept)
    freed.grad = torch.ones_like(freed)
    freed.requires_grad_(False)
    state.place(["embedding.weight", "table"], CPU)
    assert state.is_placed
    assert module.embedding.weight is kept
    assert module.head.weight is kept
    assert torch.equal(kept, value)
    assert torch.equal(kept.grad, torch.ones_like(kept))
    assert module.norm.weight is freed
    assert freed.device.type == "meta"
    assert freed.grad is None
    assert not freed.requires_grad
    assert isinstance(freed, nn.Parameter)
    assert module.norm.running_mean.device.type == "meta"
    assert module.table.device == CPU
    assert module.head.table is module.table
    assert [name for name, _ in state.local_parameters()] == ["embedding.weight"]


def test_placing_moves_to_the_device_and_keeps_requires_grad():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].weight.requires_grad_(False)
    state = ModelState(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1)
    state.place(["0.weight", "0.bias"], torch.device("meta"))
    assert all(p.device.type == "meta" for p in optimizer.param_groups[0]["params"])
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]


def test_parameters_in_an_earlier_graph_cannot_move():
    module = nn.Linear(2, 2)
    state = ModelState(module)
    loss = module(torch.ones(1, 2, requires_grad=True)).sum()
    with pytest.raises(
        MpxlaError, match=r"parameter weight cannot move to meta: .*Drop losses and"
    ):
        state.place([], CPU)
    assert loss.requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_modules_have_computed_of_parameters_does_not_hold_them():
    module = nn.utils.weight_norm(nn.Linear(2, 3))
    value = module.weight.detach().clone()
    state = ModelState(module)
    state.place(["weight_g", "weight_v"], CPU)
    assert module.bias.device.type == "meta"
    assert torch.equal(module.weight, value) and module.weight.grad_fn is None


def test_buffers_of_other_ranks_are_known_to_have_no_values():
    model = Tied()
    state = ModelState(model)
    state.place([n for n in [*state.parameters, *state.buffers] if n != "table"], CPU)
    for _ in range(2):
        average = torch.zeros(2)
        with pytest.raises(StepError, match="parameter or buffer that has no values here"):
            average.mul_(0.9).add_(model.head.table, alpha=0.1)
        assert model.head.table is model.table and model.table.is_meta
        state.adopt_buffer("table", torch.ones(2))
        assert average.add_(model.head.table).tolist() == [1, 1]
        state.leave_buffer("table")


def test_buffers_are_replaced_wherever_they_are():
    module = Tied()
    state = ModelState(module)
    new = torch.full((2,), 9.0)
    state.set_buffer("table", new)
    assert module.table is module.head.table is new
    assert state.buffers["table"] is new


def test_what_a_model_gets_later_has_names_of_its_own():
    module = Tied()
    state = ModelState(module)
    state.place([*PARAMETERS, *BUFFERS], CPU)
    old, module.norm = module.norm, nn.BatchNorm1d(3)
    del module.table
    names = state.canonical_names
    assert names["norm.weight"] == "norm.weight#2" and names["again.weight"] == "norm.weight"
    assert state.parameters["norm.weight"] is old.weight, "optimizers may hold it"
    assert "table" not in names and names["head.table"] == "table"
    assert state.names_now["norm.weight#2"] == "norm.weight"
    assert state.names_now["norm.weight"] == "again.weight"
    assert [p is module.norm.weight for p in state.waiting] == [True, False]
    assert state.holds("norm.weight#2"), "it has values, and is not placed"
    state.place(["norm.weight#2"], CPU)
    assert state.holds("norm.weight#2") and not state.holds("norm.bias#2")
    assert module.norm.bias.is_meta and not module.norm.weight.is_meta and not state.waiting


def test_gathering_on_the_host():
    module = Tied()
    state = ModelState(module)
    full = {name: value.clone() + 1 for name, value in module.state_dict().items()}
    state.place(["embedding.weight"], CPU)
    parameter = module.norm.weight
    state.gather_on_host(full)
    for name, value in module.state_dict().items():
        assert torch.equal(value, full[name]), name
    assert module.norm.weight is parameter
    assert module.head.weight is module.embedding.weight
    assert len(list(state.local_parameters())) == 3
    module.norm.weight.data.add_(1)
    assert not torch.equal(module.norm.weight, full["norm.weight"]), "values were copied"


def test_loading_skips_what_other_ranks_hold():
    module = Tied()
    ModelState(module).place(["embedding.weight", *BUFFERS], CPU)
    values = {name: torch.full(t.shape, 5.0) for name, t in module.state_dict().items()}
    result = load_into(module, values, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert module.embedding.weight.eq(5).all()
    assert module.table.eq(5).all()
    assert module.norm.weight.device.type == "meta"


def test_loading_checks_what_other_ranks_hold():
    module = Tied()
    ModelState(module).place([], CPU)
    values = dict(ModelState(Tied()).module.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight.*\[7\]"):
        load_into(module, {**values, "norm.weight": torch.ones(7)}, strict=True)
    missing = {name: value for name, value in values.items() if name[-4:] != "bias"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm\.bias"'):
        load_into(module, missing, strict=True)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        load_into(module, {**values, "other": torch.ones(1)}, strict=True)
    result = load_into(module, {**missing, "other": torch.ones(1)}, strict=False)
    assert "norm.bias" in result.missing_keys
    assert result.unexpected_keys == ["other"]


def test_a_tied_parameter_loads_under_any_of_its_names():
    module = Tied()
    values = {name: torch.full(t.shape, 6.0) for name, t in module.state_dict().items()}
    del values["embedding.weight"]
    result = load_into(module, values, strict=True)
    assert result.missing_keys == []
    assert module.embedding.weight.eq(6).all()
