"""What the parameter store writes and keeps, on backends without a device."""

import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpxla
from mpxla.parallel.gradients.in_scripts import own_gradient, set_own_gradient
from mpxla.parallel.store import ParameterStore
from mpxla.parallel.updates.copy import renewed
from mpxla.parallel.updates.optimizer_state import MASTER_KEY, OptimizerState
from mpxla.parallel.updates.pieces import OptimizerPieces
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.runtime.state import ModelState
from mpxla.stage.spec import TensorSpec
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.device.eager import EagerBackend
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit
BF16, F32 = torch.bfloat16, torch.float32
FINE = 2.0**-12
"""What bfloat16 rounds away from numbers from 1 to 2."""
NAMES = ("weight", "bias", "norm")


class Net(nn.Module):
    """Two parameters of 16 bits, [2, 3] and [3], and one of 32, [5]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 6).view(2, 3).to(BF16))
        self.bias = nn.Parameter(torch.full((3,), -1.5, dtype=BF16))
        self.norm = nn.Parameter(torch.ones(5))


def store_of(backend=None, master_dtype=F32):
    state = ModelState(Net())
    state.local_names = frozenset(NAMES)
    store = ParameterStore(state, backend or EagerBackend(), master_dtype)
    store.ranks = dict.fromkeys(NAMES, (0,))
    return store


def with_masters():
    store = store_of()
    for _ in range(2):
        store.widen(NAMES)  # the second one finds nothing to do
    assert store.num_parts == 1
    return store


def divided(store, transport, capacity_bytes=1 << 20):
    store.divide(NAMES, capacity_bytes, transport, (0, 1))
    return store


def in_two_replicas(body, master_dtype=F32):
    """Runs a function of (store, replica) in two threads; its results."""

    def run(transport):
        return body(divided(store_of(master_dtype=master_dtype), transport), transport.rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, threads_world(2)))


def test_masters_have_the_shape_and_the_values_of_their_parameters():
    store = with_masters()
    assert [copy.name for copy in store.copies()] == ["weight", "bias"]
    for copy in store.copies():
        parameter = store.state.parameters[copy.name]
        assert copy.extent is None and store.owner(copy.name) is copy.parameter
        assert (copy.parameter.dtype, copy.parameter.shape) == (F32, parameter.shape)
        assert torch.equal(copy.parameter, parameter.float())
    assert store.owner("norm") is store.state.parameters["norm"]
    assert store.gradient_spec("bias") == TensorSpec((3,), F32)


def test_without_a_type_for_masters_there_are_none():
    store = store_of(master_dtype=None)
    store.widen(NAMES)
    assert not store.num_parts and not store.has_copies
    store.add_gradients(["bias"], [torch.ones(3)])
    assert store.state.parameters["bias"].grad.dtype is BF16, "the type that torch asks for"


def test_all_ranks_know_whether_some_has_masters():
    store = store_of()
    store.state.local_names = frozenset(["norm"])
    store.widen(NAMES)
    assert store.has_copies and not store.num_parts, "the others are elsewhere"
    for name in ("weight", "bias"):
        store.state.parameters[name].requires_grad_(False)
    assert not store.has_copies
    wide = store_of()
    wide.state.module.float()
    assert not wide.has_copies


def test_frozen_parameters_get_their_master_when_a_step_trains_them():
    store = store_of()
    store.state.parameters["bias"].requires_grad_(False)
    store.widen([name for name in NAMES if name != "bias"])
    optimizer, state = optimizer_of(store)
    store.widen(NAMES)
    assert state.pieces.is_behind(store) and store.copy_of("bias") is not None
    state.pieces.exchange(store)
    assert not state.pieces.is_behind(store)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert list(map(id, held)) == [id(store.owner(name)) for name in NAMES]


def test_a_master_keeps_its_low_bits_until_somebody_writes_to_the_parameter():
    store = with_masters()
    master, parameter = store.owner("weight"), store.state.parameters["weight"]
    master.data += FINE
    store.publish(["weight"])
    before = master.detach().clone()
    store.renew(["weight"])
    assert torch.equal(master, before), "an unchanged parameter takes nothing from its master"
    assert not torch.equal(master, parameter.float()), "the test is about bits that were rounded"
    parameter.data[0, 1] = 7.0  # no version counter sees it
    store.renew(["weight"])
    before[0, 1] = 7.0
    assert torch.equal(master, before), "one element is new, and its neighbours keep their bits"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_is_written_may_be_any_number(value):
    copy = torch.tensor([1.0 + FINE, float("inf")])
    found = renewed(torch.tensor([value, float("inf")], dtype=BF16), copy)
    torch.testing.assert_close(found, torch.tensor([value, float("inf")]), equal_nan=True)


def test_publishing_rounds_masters_to_the_parameters():
    store = with_masters()
    parameters = {name: store.state.parameters[name] for name in NAMES}
    store.owner("weight").data.fill_(1.0 + FINE)
    store.publish(NAMES)
    assert parameters["weight"].eq(1).all() and parameters["weight"].dtype is BF16
    assert parameters["bias"].eq(-1.5).all() and parameters["norm"].eq(1).all()
    assert all(store.state.parameters[name] is parameters[name] for name in NAMES)


def test_gradients_of_16_bits_are_summed_in_the_type_of_the_master():
    store = with_masters()
    small = torch.full((3,), FINE, dtype=BF16)
    for gradient in (torch.ones(3, dtype=BF16), small, small.float()):
        store.add_gradients(["bias"], [gradient])
    assert store.owner("bias").grad.eq(1 + 2 * FINE).all()
    assert own_gradient(store.state.parameters["bias"]) is None
    store.clear_gradients(set_to_none=False)
    assert not store.owner("bias").grad.any()
    store.clear_gradients(set_to_none=True)
    assert store.owner("bias").grad is None


def test_gradients_that_are_on_a_parameter_go_to_its_master():
    store = with_masters()
    store.add_gradients(["bias"], [torch.full((3,), FINE)])
    set_own_gradient(store.state.parameters["bias"], torch.ones(3, dtype=BF16))  # as autograd does
    store.state.parameters["norm"].grad = kept = torch.ones(5)
    store.collect_gradients()
    assert store.owner("bias").grad.eq(1 + FINE).all()
    assert own_gradient(store.state.parameters["bias"]) is None
    assert store.state.parameters["norm"].grad is kept


def test_parameters_show_the_gradients_of_their_masters():
    store = with_masters()
    bias, master = store.state.parameters["bias"], store.owner("bias")
    assert bias.grad is None and isinstance(bias, nn.Parameter)
    store.add_gradients(["bias"], [torch.full((3,), FINE)])
    assert bias.grad is master.grad and bias.grad.dtype is F32
    bias.grad.mul_(2)
    set_own_gradient(bias, torch.ones(3, dtype=BF16))
    assert bias.grad.eq(1 + 2 * FINE).all() and master.grad is bias.grad
    bias.grad = torch.ones(3, dtype=BF16)
    assert master.grad.dtype is F32 and master.grad.eq(1).all()
    assert deepcopy(bias).grad is None
    bias.grad = None
    assert master.grad is None


def test_gradients_of_earlier_passes_are_taken_once():
    store = with_masters()
    store.add_gradients(["bias", "norm"], [torch.ones(3), torch.ones(5)])
    found = store.take_gradients(["bias", "weight", "norm"])
    assert [None if g is None else g.numel() for g in found] == [3, None, 5]
    assert store.take_gradients(["bias", "weight", "norm"]) == [None] * 3


def test_pieces_are_wide_and_travel_in_the_type_of_the_parameters():
    def train(store, replica):
        gathered = []
        for shard in store.shards.values():
            gather = shard._transport.all_gather
            shard._transport.all_gather = lambda flat, group, gather=gather: (
                gathered.append(flat.dtype),
                gather(flat, group),
            )[1]
        for copy in store.copies():
            copy.parameter.data += FINE + replica
        store.publish(NAMES)
        extents = {c.name: (c.extent, c.parameter.dtype) for c in store.copies()}
        low_bits = all(c.parameter.frac().ne(0).any() for c in store.copies())
        store.renew(NAMES)
        low_bits = low_bits and all(c.parameter.frac().ne(0).any() for c in store.copies())
        values = {name: p.detach().clone() for name, p in store.state.parameters.items()}
        return gathered, extents, low_bits, values

    first, second = in_two_replicas(train)
    for gathered, extents, low_bits, _ in (first, second):
        assert sorted(map(str, set(gathered))) == ["torch.bfloat16", "torch.float32"]
        assert all(dtype is F32 for _, dtype in extents.values()) and low_bits
    assert first[1]["weight"][0] == (0, 5) and second[1]["weight"][0] == (5, 6)
    plain = Net()
    for (name, value), other in zip(first[3].items(), second[3].values(), strict=True):
        assert torch.equal(value, other), name
        whole = plain.get_parameter(name).detach()
        added = torch.zeros(whole.numel())
        for replica, found in ((0, first), (1, second)):
            if name in found[1]:
                added[slice(*found[1][name][0])] = FINE + replica
        assert torch.equal(value, (whole.float() + added.view(whole.shape)).to(whole.dtype)), name


def test_pieces_without_masters_have_the_type_of_the_parameters():
    def receive(store, replica):
        for bucket in store.shards:
            assert bucket.dtype is F32, "gradients are reduced in float32 anyway"
            flat = torch.ones(bucket.num_elements // 2)
            store.receive(bucket, flat, frozenset(NAMES))
        store.renew(NAMES)
        store.publish(NAMES)
        return {
            c.name: (c.parameter.dtype, c.parameter.grad.dtype, c.parameter.detach())
            for c in store.copies()
        }

    first, second = in_two_replicas(receive, master_dtype=None)
    for name, *found in [(n, *f) for pieces in (first, second) for n, f in pieces.items()]:
        own = Net().get_parameter(name).dtype
        assert found[:2] == [own, own]
    joined = torch.cat([first["weight"][2], second["weight"][2]])
    assert torch.equal(joined.view(2, 3), Net().weight)


def test_gradients_of_divided_parameters_wait_for_their_reduction():
    def reduce(store, replica):
        store.add_gradients(["weight"], [torch.ones(2, 3, dtype=BF16)])
        store.add_gradients(["weight"], [torch.full((2, 3), FINE)])
        assert all(copy.parameter.grad is None for copy in store.copies())
        (waiting,) = store.take_gradients(["weight"])
        assert store.take_gradients(["weight"]) == [None]
        for bucket in store.shards:
            length = bucket.num_elements // 2
            flat = torch.arange(float(length)) + replica * length
            store.receive(bucket, flat, frozenset(["weight", "bias"]))
        found = {c.name: c.parameter.grad for c in store.copies()}
        return waiting, found

    first, second = in_two_replicas(reduce)
    assert first[0].eq(1 + FINE).all()
    assert first[1]["weight"].tolist() == [0, 1, 2, 3, 4]
    assert second[1]["weight"].tolist() == [5] and second[1]["bias"].tolist() == [6, 7, 8]
    assert first[1]["norm"] is None, "a parameter that the step does not train"


def test_values_wider_than_a_parameter_are_loaded_exactly():
    values = {"weight": torch.full((2, 3), 1 + FINE), "norm": torch.full((5,), 1 + FINE)}
    store = with_masters()
    store.load(values)
    assert torch.equal(store.owner("weight"), values["weight"])
    assert store.state.parameters["weight"].eq(1).all()
    assert torch.equal(store.state.parameters["norm"], values["norm"])
    for pieces in in_two_replicas(
        lambda store, _: (store.load(values), {c.name: c.parameter for c in store.copies()})[1]
    ):
        assert pieces["weight"].eq(1 + FINE).all()


def optimizer_of(store):
    parameters = [store.state.parameters[name] for name in NAMES]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    model = SimpleNamespace(store=store, label="", module=store.state.module, shards_of_tensors={})
    state = OptimizerState(optimizer, [model], store.backend)
    state.pieces.exchange(store)
    return optimizer, state


def step(store, optimizer, state):
    for name in NAMES:
        spec = store.gradient_spec(name)
        store.add_gradients([name], [torch.full(spec.shape, 0.3, dtype=spec.dtype)])
    state.pieces.renew()
    optimizer.step()
    state.pieces.publish(has_masters=True)
    store.clear_gradients(set_to_none=True)
    store.state.parameters["norm"].grad = None


def train_with_masters(kind, is_compiled):
    """Masters and parameters after steps, with a write of the user's in between; and the calls."""
    store = with_masters()
    parameters = [store.state.parameters[name] for name in NAMES]
    optimizer = kind(parameters, lr=1e-3)
    pieces = OptimizerPieces(optimizer, {id(p): i for i, p in enumerate(parameters)})
    pieces.exchange(store)
    update = CompiledUpdate(optimizer, store.backend, pieces)
    update.reason = None if is_compiled else "it is not to be"
    for number in range(4):
        trained = NAMES if number != 2 else NAMES[1:]
        for name in trained:
            spec = store.gradient_spec(name)
            gradient = torch.linspace(-1, 1, spec.shape[-1]).expand(spec.shape) + number
            store.add_gradients([name], [gradient.contiguous()])
        if number == 1:
            store.state.parameters["bias"].data[1] = 3.0
        store.backend.calls.clear()
        pieces.renew_divided()
        update.step()
        pieces.publish(has_masters=not update.was_compiled)
        store.clear_gradients(set_to_none=True)
        store.state.parameters["norm"].grad = None
    values = [store.owner(n).detach() for n in NAMES] + [p.detach() for p in parameters]
    return update.was_compiled, values, [c for c in store.backend.calls if " " in c]


@pytest.mark.parametrize(
    "kind", [pytest.param(torch.optim.AdamW, marks=pytest.mark.slow), torch.optim.SGD]
)
def test_a_compiled_update_renews_and_publishes_masters(kind):
    was_compiled, values, calls = train_with_masters(kind, True)
    assert was_compiled and calls == ["optimizer update"]
    was_compiled, expected, calls = train_with_masters(kind, False)
    assert not was_compiled and calls == ["renewal of update copies", "rounding of masters"]
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-6, atol=0)
    assert 2.9 < values[1][1] < 3.1, "what the user wrote is trained on"
    assert torch.equal(values[3], values[0].to(BF16)) and not torch.equal(
        values[0], values[3].float()
    )


def test_the_state_of_an_optimizer_holds_masters_and_takes_them_back():
    store = with_masters()
    optimizer, state = optimizer_of(store)
    step(store, optimizer, state)
    saved = state.of_rank(is_divided=False)
    assert list(saved["state"][0]) == ["step", "exp_avg", "exp_avg_sq", MASTER_KEY]
    assert MASTER_KEY not in saved["state"][2], "a parameter of 32 bits is its own master"
    weights = {name: p.detach().clone() for name, p in store.state.parameters.items()}
    step(store, optimizer, state)
    other = with_masters()
    inner, again = optimizer_of(other)
    again.load(saved)
    assert MASTER_KEY not in inner.state[other.owner("weight")]
    for name, value in weights.items():  # from the model's own state dict
        other.state.parameters[name].data = value
    step(other, inner, again)
    for name in NAMES:
        assert torch.equal(other.owner(name), store.owner(name)), name


def test_the_state_of_an_optimizer_alone_leaves_parameters_as_they_are():
    store = with_masters()
    optimizer, state = optimizer_of(store)
    step(store, optimizer, state)
    saved = state.of_rank(is_divided=False)
    step(store, optimizer, state)
    values = {name: p.detach().clone() for name, p in store.state.parameters.items()}
    masters = {name: store.owner(name).detach().clone() for name in NAMES}
    state.load(saved)
    state.of_rank(is_divided=False)  # renews masters
    for name in NAMES:
        assert torch.equal(store.state.parameters[name], values[name]), name
        assert torch.equal(store.owner(name), masters[name]), name


def test_state_that_is_there_before_becomes_as_wide_as_the_masters():
    store = with_masters()
    parameters = [store.state.parameters[name] for name in NAMES]
    optimizer = torch.optim.Adagrad(parameters, initial_accumulator_value=0.5)
    pieces = OptimizerPieces(optimizer, {id(p): i for i, p in enumerate(parameters)})
    assert optimizer.state[parameters[0]]["sum"].dtype is BF16
    pieces.exchange(store)
    found = optimizer.state[store.owner("weight")]["sum"]
    assert found.dtype is F32 and found.eq(0.5).all() and parameters[0] not in optimizer.state


def test_masters_that_were_saved_are_the_parameters_of_a_float32_run():
    store = with_masters()
    optimizer, state = optimizer_of(store)
    step(store, optimizer, state)
    saved = state.of_rank(is_divided=False)
    wide = store_of()
    wide.state.module.float()
    wide.widen(NAMES)
    assert not wide.num_parts
    inner, again = optimizer_of(wide)
    with torch.no_grad():
        wide.state.parameters["weight"].copy_(store.state.parameters["weight"])
    again.load(saved)
    assert torch.equal(wide.state.parameters["weight"], store.owner("weight"))
    assert list(inner.state[wide.state.parameters["weight"]]) == ["step", "exp_avg", "exp_avg_sq"]


def test_a_state_without_masters_starts_them_from_the_parameters():
    store = store_of(master_dtype=None)
    optimizer, state = optimizer_of(store)
    step(store, optimizer, state)
    saved = state.of_rank(is_divided=False)
    assert MASTER_KEY not in saved["state"][0]
    other = with_masters()
    inner, again = optimizer_of(other)
    again.load(saved)
    assert torch.equal(other.owner("weight"), Net().weight.float())
    assert inner.state[other.owner("weight")]["exp_avg"].dtype is F32


def test_a_written_parameter_is_saved_as_it_is_now():
    store = with_masters()
    _, state = optimizer_of(store)
    with torch.no_grad():
        store.state.parameters["bias"].fill_(4.0)
    entries = {piece.name: piece.value for piece in state.entries() if piece.key == MASTER_KEY}
    assert entries["bias"].eq(4).all() and entries["bias"].dtype is F32
    assert sorted(entries) == ["bias", "weight"]


def test_renewal_and_rounding_are_one_program_each():
    store = store_of(NullBackend())
    store.widen(NAMES)
    backend = store.backend
    store.renew(NAMES)
    store.publish(NAMES)
    count, backend.calls = backend.num_compilations, []
    store.renew(NAMES)
    store.publish(NAMES)
    assert backend.num_compilations == count
    programs = [call for call in backend.calls if " of " in call]
    assert programs == ["renewal of update copies", "rounding of masters"]


WRITERS = {
    "parallel/store.py": "the store",
    "parallel/copies.py": "models and their copies exchange values",
    "parallel/updates/update.py": "gradients are hidden from the inner optimizer for a moment",
    "runtime/state.py": "parameters are moved to their ranks",
    "runtime/valueless.py": "shapes and dtypes of what other ranks hold",
    "parallel/compute_dtype.py": "models are converted before the store is made",
    "parallel/gradients/in_scripts.py": "assignments to parameters that have masters",
    "parallel/updates/closures.py": "copies on the host, which only LBFGS sees",
    "parallel/updates/others.py": "copies of what other ranks hold, during an update",
    "parallel/state_dicts.py": "counters of writes to copies",
    # Tensors of trials and of tracing, which no model has.
    "parallel/updates/elementwise.py": "a trial",
    "parallel/updates/state.py": "a trial",
    "parallel/updates/trace.py": "stand-ins",
}


def test_nobody_else_writes_to_parameters():
    root = Path(mpxla.__file__).parent
    found = {
        str(path.relative_to(root))
        for folder in ("parallel", "runtime", "checkpoint")
        for path in (root / folder).rglob("*.py")
        if re.search(r"\.(data|grad) = ", path.read_text())
    }
    assert found == set(WRITERS)


# Parameters in parts.


def in_parts(index):
    """The store of one rank of two: the weight and the norm are divided, the bias is too small."""
    store = store_of()
    store.state.divide(index, 2, 4, gradients_only=False)
    assert set(store.state.shards) == {"weight", "norm"}
    for name in store.state.shards:
        store.set_part(name, store.state.whole_on_host(name))
    store.state.end_dividing()
    store.update_parts()
    store.widen(NAMES)
    return store


def test_parts_and_masters_of_parts():
    whole, held = Net(), {}
    for index in range(2):
        store = in_parts(index)
        state = store.state
        assert state.parameters["weight"].is_meta and state.parameters["weight"].shape == (2, 3)
        assert store.is_divided and store.has_copies
        assert set(store.local_tensors()) == {"bias"}
        extents = {copy.name: copy.extent for copy in store.copies()}
        expected = {"weight": [(0, 3), (3, 6)][index], "norm": [(0, 3), (3, 5)][index]}
        assert extents == {**expected, "bias": None}
        copy = store.copy_of("weight")
        assert copy.parameter.dtype is F32 and state.held("weight").dtype is BF16
        assert store.copy_of("norm").parameter is state.held("norm")  # it needs no master
        assert store.gradient_spec("weight") == TensorSpec((3,), F32)
        held[index] = state.held("weight").detach()
        copy.parameter.data = copy.parameter + FINE
        store.renew(NAMES)  # nothing but the store writes to parts
        store.publish(NAMES)
        assert torch.equal(copy.parameter.to(BF16), state.held("weight"))
        assert not torch.equal(copy.parameter, state.held("weight").float())
        gradient = torch.arange(3.0)
        store.add_gradients(["weight"], [gradient])
        store.add_gradients(["weight"], [gradient])
        assert torch.equal(copy.parameter.grad, 2 * gradient)
        (taken,) = store.take_gradients(["weight"])
        assert torch.equal(taken, 2 * gradient) and copy.parameter.grad is None
    assert torch.equal(torch.cat([held[0], held[1]]), whole.weight.reshape(-1))


def test_parts_take_whole_values():
    store = in_parts(1)
    exact = torch.linspace(1, 2, 6).view(2, 3) + FINE / 3
    store.load({"weight": exact, "norm": torch.arange(5.0)})
    assert torch.equal(store.copy_of("weight").parameter, exact.reshape(-1)[3:])
    assert torch.equal(store.state.held("weight"), exact.reshape(-1)[3:].to(BF16))
    assert store.state.held("norm").tolist() == [3.0, 4.0]
    assert store.state.parameters["norm"].is_meta
