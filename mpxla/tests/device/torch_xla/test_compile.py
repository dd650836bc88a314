"""Executables: order of arguments, kinds of results, randomness, missing lowerings."""

import pytest
import torch
from torch import fx, nn

import mpxla as smp
from mpxla.device.torch_xla.compile import compile_graph
from mpxla.device.torch_xla.tensors import current_device, to_device
from mpxla.stage.spec import TensorSpec
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Mixed(nn.Module):
    """An unused argument, a constant, an argument passed on, and one result twice."""

    def forward(self, a, unused, b):
        table = torch.arange(3, dtype=torch.float32, device=a.device) * 7
        total = a - 2 * b + table
        return [total, b, a.sum(), total]


class Draw(nn.Module):
    def forward(self, a):
        return [torch.rand_like(a), a + 1]


def compiled(module, *shapes):
    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.stage.spec import TensorSpec

    specs = [TensorSpec(shape, torch.float32) for shape in shapes]
    graph = fx.symbolic_trace(module)
    return compile_graph("trial", graph, specs, current_device())


def on_device(*tensors):
    from mpxla.device.torch_xla.tensors import current_device, to_device

    return to_device(tensors, current_device())


def run_mixed():
    from mpxla.device.torch_xla.compile import num_compilations

    program = compiled(Mixed(), (3,), (5,), (3,))
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    on_device(a)  # the first touch of the device may compile
    before = num_compilations()
    results = [program(on_device(scale * a, torch.zeros(5), b)) for scale in (1, 2)]
    host = [[value.cpu() for value in row] for row in results]
    is_same = results[0][0] is results[0][3]
    return host, is_same, num_compilations() - before, program.is_random


def test_program_takes_and_gives_what_the_module_does():
    ((rows, is_same, num_compilations, is_random),) = run_ranks(run_mixed, 1)
    for scale, (total, passed_on, summed, again) in zip((1, 2), rows, strict=True):
        a = scale * torch.tensor([1.0, 2.0, 3.0])
        assert total.tolist() == (a - torch.tensor([20.0, 33.0, 46.0])).tolist()
        assert passed_on.tolist() == [10.0, 20.0, 30.0]
        assert summed.item() == a.sum().item()
        assert torch.equal(again, total)
    assert is_same
    assert (num_compilations, is_random) == (0, False)


def run_random():
    from mpxla.device.torch_xla.compile import num_compilations
    from mpxla.device.torch_xla.tensors import make_ready

    program = compiled(Draw(), (50,))
    (x,) = on_device(torch.zeros(50))
    before, rows = num_compilations(), []
    for seed in (1, 0, 1, 2**61):
        value = on_device(torch.tensor(seed))[0]
        make_ready([value])
        rows.append(program([x], value)[0].cpu())
    return rows, program.is_random, num_compilations() - before


def test_random_program_is_a_function_of_its_seed():
    (((first, other, again, large), is_random, num_compilations),) = run_ranks(run_random, 1)
    assert is_random
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, large)
    assert num_compilations == 0
    assert 0 <= first.min() < 0.2 and 0.8 < first.max() < 1


class Wrong(nn.Module):
    """Two results of which the second is as it should not be: indices of 32 bits called int64."""

    def forward(self, a):
        values = a.cummax(0)
        return [values[0], values[1]]


def run_indices():
    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.stage.spec import TensorSpec

    first = compiled(Wrong(), (3,))
    taker = fx.symbolic_trace(lambda index: [index * 2])
    second = compile_graph("taker", taker, [TensorSpec((3,), torch.int64)], current_device())
    index = first(on_device(torch.tensor([1.0, 3.0, 2.0])))[1]
    return second([index])[0].cpu()


def test_indices_of_one_program_are_arguments_of_another():
    (found,) = run_ranks(run_indices, 1)
    assert found.tolist() == [0, 2, 2]


def run_after_failure():
    program = compiled(Draw(), (3,))
    (seed,) = on_device(torch.tensor(3))
    try:
        program(on_device(torch.zeros(5)), seed)[1].cpu()  # too large
        text = ""
    except RuntimeError as error:
        text = str(error)
    return text, program(on_device(torch.ones(3)), seed)[1].cpu()


def test_program_runs_after_another_has_failed():
    # The failed one has left a ticket that never becomes ready.
    ((text, found),) = run_ranks(run_after_failure, 1)
    assert "incompatible size" in text
    assert found.tolist() == [2.0, 2.0, 2.0]


class Unknown(nn.Module):
    def forward(self, x):
        return [torch.special.bessel_j0(x)]


def compile_unknown():
    try:
        compiled(Unknown(), (3,))
    except smp.LoweringError as error:
        return str(error)


def test_operator_without_lowering_outside_of_graphs_is_refused():
    # An optimizer's update, say, is no graph of the lowering that could be cut.
    (text,) = run_ranks(compile_unknown, 1)
    assert text.startswith(
        "trial: operators without an XLA lowering:\n  aten::special_bessel_j0 in"
    )
    assert "Replace them in the model" in text


class ToHost(nn.Module):
    """torch_xla's kernel gives other dtypes than PyTorch: only a trial on known values tells."""

    def forward(self, x, weight, bias, last, last_bias):
        norm = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, 1e-5)
        return [torch.ops.aten.addmm.default(last_bias, norm[0], last)]


def run_to_host():
    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.stage.spec import TensorSpec

    torch.manual_seed(1)
    norm, last = [torch.rand(3), torch.rand(3)], [torch.rand(3, 3).half(), torch.rand(3).half()]
    values = [torch.rand(4, 3).half(), *norm, *last]
    specs = [TensorSpec.of(value) for value in values]
    found = []
    for name in ("forward", "backward"):  # whose operators are known, and its values are not
        graph = fx.symbolic_trace(ToHost())
        program = compile_graph(name, graph, specs, current_device())
        found.append(program(on_device(*values))[0].cpu())
    return found, ToHost()(*values)[0]


def test_operator_that_went_to_the_host_goes_there_in_later_programs():
    ((found, expected),) = run_ranks(run_to_host, 1)
    for value in found:
        torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)


class PassOn(nn.Module):
    def forward(self, a, b):
        return [b, a]


def run_nothing():
    program = compiled(PassOn(), (2,), (3,))
    arguments = on_device(torch.ones(2), torch.zeros(3))
    results = program(arguments)
    return len(program._sources), [r is a for r, a in zip(results, arguments[::-1], strict=True)]


def test_program_without_computation_hands_its_arguments_on():
    assert run_ranks(run_nothing, 1) == [(0, [True, True])]


def run_in_order():
    from mpxla.device.torch_xla.compile import Executable

    programs = [compiled(Mixed(), (3,), (5,), (3,)), compiled(Draw(), (2,))]
    before = Executable.next_ticket.item()
    programs[0](on_device(torch.ones(3), torch.zeros(5), torch.ones(3)))
    results = programs[1](on_device(torch.ones(2)), on_device(torch.tensor(3))[0])
    return before, Executable.next_ticket.item(), len(results)


def test_every_program_waits_for_the_one_before():
    # XLA's CPU client would run both at once: each takes the ticket that the other returned.
    ((before, after, num_results),) = run_ranks(run_in_order, 1)
    assert after == before + 2
    assert num_results == 2


class First(torch.nn.Module):
    def forward(self, a, b):
        return [(a - b) + a]


class Second(torch.nn.Module):
    def forward(self, a, b):
        return [(a - b) + b]


def test_programs_that_differ_in_places_of_arguments_only_are_not_confused():
    """torch_xla 2.9 gives them one hash, and would run the first for both."""
    spec, device = TensorSpec((2,), torch.float32), current_device()
    a, b = to_device([torch.tensor([10.0, 20.0]), torch.tensor([1.0, 2.0])], device)
    programs = [
        compile_graph("sum", fx.symbolic_trace(kind()), [spec, spec], device)
        for kind in (First, Second, Second)
    ]
    results = [program([a, b])[0].cpu().tolist() for program in programs]
    assert results == [[19.0, 38.0], [10.0, 20.0], [10.0, 20.0]]


class Turning(torch.nn.Module):
    def forward(self, a):
        b = a * 2
        return [b, b.t(), b.t()]


def test_a_view_that_is_the_tensor_itself_is_one_result_with_it():
    device = current_device()
    graph = fx.symbolic_trace(Turning())
    program = compile_graph("turning", graph, [TensorSpec((2,), torch.float32)], device)
    results = program(to_device([torch.tensor([1.0, 2.0])], device))
    assert [result.cpu().tolist() for result in results] == [[2.0, 4.0]] * 3
