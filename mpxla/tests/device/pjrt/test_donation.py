"""Programs take the memory of what is donated, unless somebody else sees it: above all updates.

On the CPU XLA copies what somebody sees. On CUDA it refuses to run: a backend on the CPU that goes
the same way must leave nothing to be copied.
"""

import re

import jax
import pytest
import torch
from torch import fx

from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.transport import Members
from mpxla.device.pjrt.arrays import copy_to_device
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.device.pjrt.donation import SparingExecutable
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.stage.pieces import CollectivePiece, ComputePiece
from mpxla.stage.piecewise import PiecewiseExecutable
from mpxla.stage.spec import TensorSpec

SIZE = 1 << 14
NUM_STEPS = 5


class Strict(SparingExecutable):
    """Refuses to run where XLA would copy."""

    def __init__(self, program, donated, *more):
        def call(arguments, seed):
            given = {arguments[i].unsafe_buffer_pointer() for i in donated}
            results = program(arguments, seed)
            assert given == {array.unsafe_buffer_pointer() for array in results}
            return results

        super().__init__(program, donated, *more)
        self._program, self.original = call, program


@pytest.fixture(params=["CPU", "CUDA"])
def backend(request, monkeypatch):
    found = PjrtBackend("cpu")
    if request.param == "CUDA":
        found.is_host = False
        monkeypatch.setattr("mpxla.device.pjrt.backend.SparingExecutable", Strict)

        def put(tensor, device, owned):  # there XLA has memory of its own for it
            return copy_to_device(tensor, device, owned).copy()

        monkeypatch.setattr("mpxla.device.pjrt.backend.copy_to_device", put)
    return found


def make():
    parameters = [torch.nn.Parameter(torch.ones(SIZE) * i) for i in (1, 2)]
    return parameters, torch.optim.AdamW(parameters, lr=0.1)


def moments(parameters, optimizer):
    return [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]


def train(parameters, optimizer, update, before_last):
    """Steps by equal gradients; a function is called before the last one."""
    for number in range(NUM_STEPS):
        for p in parameters:
            p.grad = torch.linspace(-1, 1, SIZE) * (number + 1)
        if number == NUM_STEPS - 1:
            before_last()
        update()


def places(tensors):
    return {tensor.data_ptr() for tensor in tensors}


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_results_take_the_memory_of_parameters_and_state(backend):
    parameters, optimizer = make()
    update, before, live = CompiledUpdate(optimizer, backend), set(), []

    def note():
        before.update(places([*parameters, *moments(parameters, optimizer)]))
        live.append(live_bytes())

    train(parameters, optimizer, update.step, note)
    assert update.was_compiled
    assert len(before) == 6
    assert before == places([*parameters, *moments(parameters, optimizer)])
    optimizer.zero_grad()  # the arrays of the gradients, of which there were none before
    assert live_bytes() - live[0] < SIZE * 4, "no second copy of anything"
    (program,) = update._programs.values()
    if isinstance(program, Strict):
        program = program.original
    assert program._call.memory_analysis().alias_size_in_bytes >= 6 * SIZE * 4


def test_the_first_update_takes_the_memory_of_the_zeros_it_starts_from(backend, monkeypatch):
    parameters, optimizer = make()
    original, made = backend.zeros, []

    def zeros(specs):
        made.extend(original(specs))
        return list(made)

    monkeypatch.setattr(backend, "zeros", zeros)
    update = CompiledUpdate(optimizer, backend)
    for p in parameters:
        p.grad = torch.ones(SIZE)
    update.step()
    assert len(made) == 4 and all(array.is_deleted() for array in made)
    assert [*optimizer.state[parameters[0]]] == ["step", "exp_avg", "exp_avg_sq"]


def test_a_tensor_of_the_state_keeps_its_numbers_and_a_view_of_a_parameter_follows(backend):
    parameters, optimizer = make()
    update, held, copies, views = CompiledUpdate(optimizer, backend), [], [], []

    def hold():
        held.extend(moments(parameters, optimizer))
        copies.extend(tensor.clone() for tensor in held)
        views.extend(p.data for p in parameters)

    train(parameters, optimizer, update.step, hold)
    assert len(held) == 4 and all(map(torch.equal, held, copies))
    assert len(views) == 2 and all(map(torch.equal, views, parameters))
    now = [*parameters, *moments(parameters, optimizer)]
    assert not places(held) & places(now), "what somebody sees is not taken"
    plain, inner = make()
    train(plain, inner, inner.step, lambda: None)
    expected = [*plain, *moments(plain, inner)]
    for found, wanted in zip(now, expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_pytorch_has_made_is_not_taken(backend):
    """Memory of a parameter that was written to, or exchanged, is not XLA's."""
    parameters, optimizer = make()
    update, held = CompiledUpdate(optimizer, backend), []

    def write():
        with torch.no_grad():
            parameters[0].add_(1)
        parameters[1].data = new = torch.full((SIZE,), 3.0)
        held.append(new)

    train(parameters, optimizer, update.step, write)
    assert held[0].eq(3).all() or held[0].data_ptr() == parameters[1].data_ptr()
    plain, inner = make()
    train(plain, inner, inner.step, lambda: [plain[0].data.add_(1), plain[1].data.fill_(3)])
    for found, wanted in zip(parameters, plain, strict=True):
        torch.testing.assert_close(found, wanted)


def test_programs_in_pieces_take_the_memory_of_sums_in_their_last_piece(backend):
    """A backward of a group of ranks: sums, and a value that others' values are added to."""
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    graph = fx.Graph()
    first, second, passed, x = (graph.placeholder(name) for name in ("a", "b", "c", "x"))
    gradient = graph.call_function(aten.add.Tensor, (x, first))
    reduced = graph.call_function(c10d.all_reduce.default, (gradient, "sum", "group"))
    arrived = graph.call_function(c10d.wait_tensor.default, (reduced,))
    new_second = graph.call_function(aten.add.Tensor, (second, arrived))  # not in their order
    new_first = graph.call_function(aten.add.Tensor, (first, arrived))
    graph.output((new_first, new_second, passed))
    module, specs = fx.GraphModule(torch.nn.Module(), graph), [TensorSpec((SIZE,), torch.float32)]
    groups = {"group": Members((0,), LoopbackTransport())}
    program = backend.compile("backward", module, specs * 4, (0, 1, 2), groups)
    assert isinstance(program, PiecewiseExecutable)
    kinds = [type(piece) for piece in program.plan.pieces]
    assert kinds == [ComputePiece, CollectivePiece, ComputePiece]

    sums, (x,) = backend.zeros(specs * 3), backend.put([torch.full((SIZE,), 2.0)])
    pointers = [array.unsafe_buffer_pointer() for array in sums]
    alive, live = [], live_bytes()
    program.on_piece = lambda number: alive.append(live_bytes() - live)
    for _ in range(3):
        results = program([*sums, x])
        assert [s.is_deleted() for s in sums[:2]] == [True, True] and results[2] is sums[2]
        sums = results
    backend.wait()
    assert [array.unsafe_buffer_pointer() for array in sums] == pointers
    assert max(alive) <= 2 * SIZE * 4, "what is added, and no second copy of the sums"
    plain = torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(3):
        plain = 2 * plain[0] + 2, plain[1] + plain[0] + 2
    for found, wanted in zip(sums, (*plain, torch.zeros(SIZE)), strict=True):
        torch.testing.assert_close(backend.view(found), wanted)


def test_accelerators_are_told_the_same():
    """What jax writes down for XLA names the results that take memory, on all platforms."""

    def update(parameter, gradient, momentum):
        momentum = momentum * 0.9 + gradient
        return [parameter - momentum, momentum]

    spec = jax.ShapeDtypeStruct((8,), "float32")
    traced = jax.jit(update, donate_argnums=(0, 2), keep_unused=True).trace(spec, spec, spec)
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(r"%arg(\d)[^%]*tf\.aliasing_output = (\d)", text) == [
            ("0", "0"),
            ("2", "1"),
        ]
