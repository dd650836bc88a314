"""The PJRT backend in one process: programs, arrays that share memory, seeds, errors."""

import gc
import os
import subprocess
import sys

import jax
import pytest
import torch
from torch import nn

from mpxla.device.pjrt.backend import PjrtBackend, _find_device
from mpxla.device.pjrt.executable import PjrtExecutable, _products_as_torch
from mpxla.errors import LoweringError, MpxlaError
from mpxla.log import get_logger
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec

VECTOR = TensorSpec((4,), torch.float32)
RANK_1 = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}
LARGE = TensorSpec((64, 64), torch.float32)


@pytest.fixture(scope="module")
def backend():
    return PjrtBackend("cpu")


def run(backend, function, *tensors, seed=None, **options):
    specs = [TensorSpec.of(t) for t in tensors]
    program = compile_function(backend, "test", function, specs, **options)
    given = None if seed is None else backend.put([torch.tensor(seed)])[0]
    return [t.clone() for t in map(backend.view, program(backend.put(tensors), given))]


def num_noted(backend):
    return len(backend._imports._imported) + len(backend._imports._published)


def test_a_program_computes(backend):
    program = compile_function(backend, "sum", lambda a, b: [a + b, a], [VECTOR, VECTOR])
    first, second = backend.put([torch.arange(4.0), torch.ones(4)])
    total, passed_on = program([first, second])
    assert torch.equal(backend.view(total), torch.arange(4.0) + 1)
    assert passed_on is first, "an argument that is a result is not copied"
    assert not program.is_random
    assert backend.spec(total) == VECTOR


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
     torch.uint8, torch.bool, torch.complex64],
)  # fmt: skip
def test_all_dtypes_there_and_back(backend, dtype):
    for tensor in (torch.arange(6).reshape(2, 3).t() % 2, torch.tensor(1), torch.zeros(0, 3)):
        tensor = tensor.to(dtype)
        (there,) = backend.put([tensor])
        for back in (backend.get([there])[0], backend.view(there), *backend.publish([there])):
            assert back.dtype is dtype and torch.equal(back, tensor)
        (adopted,) = backend.adopt([tensor])
        assert torch.equal(backend.view(adopted), tensor)


def test_what_is_put_has_memory_of_its_own(backend):
    tensor = torch.zeros(1024)
    (there,) = backend.put([tensor])
    tensor.fill_(1)
    assert not backend.view(there).any()
    copy = backend.get([there])[0]
    copy.fill_(2)
    assert not backend.view(there).any()
    assert backend.put([there])[0] is there


def test_strides_of_single_rows_and_columns_are_no_layout(backend):
    """What `torch.nonzero` gives has such ones: it is the transpose of what was written."""
    column = torch.ones(1, 1024).t()
    assert column.is_contiguous() and column.stride() == (1, 1024)
    program = compile_function(backend, "test", lambda x: [x + 1], [TensorSpec.of(column)])
    (found,) = program(backend.adopt([column]), None)
    assert backend.view(found).eq(2).all()


def test_what_nobody_else_has_is_put_without_a_copy(backend):
    tensor = torch.zeros(1024)
    (there,) = backend.put([tensor], owned=True)
    assert backend.view(there).data_ptr() == tensor.data_ptr()
    del tensor
    gc.collect()
    assert not backend.view(there).any()
    misaligned = torch.arange(1025.0)[1:]
    (there,) = backend.put([misaligned], owned=True)
    assert torch.equal(backend.view(there), misaligned)


def test_a_value_is_ready_when_it_is_computed(backend):
    (there,) = backend.put([torch.zeros(8)])
    backend.view(there)
    assert backend.is_ready(there) and backend.is_ready(torch.zeros(1))


@pytest.mark.parametrize(("said", "precision"), [("highest", "HIGHEST"), ("medium", "DEFAULT")])
def test_products_of_accelerators_are_as_exact_as_torch_says(said, precision, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: said)
    with _products_as_torch("cuda"):
        text = jax.jit(jax.numpy.dot).lower(*2 * [jax.ShapeDtypeStruct((8, 8), "float32")])
    assert f"precision = [{precision}, {precision}]" in text.as_text()
    with _products_as_torch("cpu"):
        assert jax.config.jax_default_matmul_precision is None


def test_adopted_tensors_share_memory_and_are_imported_once(backend):
    tensor = torch.zeros(1024)
    (first,) = backend.adopt([tensor])
    assert first.unsafe_buffer_pointer() == tensor.data_ptr()
    assert backend.adopt([tensor])[0] is first
    tensor.add_(1)
    (second,) = backend.adopt([tensor])
    assert second is not first and backend.view(second).eq(1).all()
    tensor.data = torch.full((1024,), 2.0)
    assert backend.view(backend.adopt([tensor])[0]).eq(2).all()


def test_published_tensors_share_memory_and_come_back_as_they_are(backend):
    (array,) = backend.put([torch.zeros(1024)])
    (tensor,) = backend.publish([array])
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert backend.adopt([tensor])[0] is array
    tensor.add_(1)
    assert backend.view(backend.adopt([tensor])[0]).eq(1).all()


def test_held_arrays_are_adopted_without_a_note_while_they_are_what_their_tensors_are(backend):
    gc.collect()
    before = num_noted(backend)
    arrays = backend.put([torch.arange(16.0).reshape(4, 4)])
    (tensor,) = backend.publish(arrays, is_held=True)
    assert num_noted(backend) == before
    assert backend.adopt([tensor], arrays)[0] is arrays[0]
    tensor[0, 1] = 5.0
    tensor.data[0, 2] = 7.0
    (array,) = backend.adopt([tensor], arrays)
    assert array is arrays[0] and backend.view(array).equal(tensor)
    kept = tensor.data
    for change in (torch.t, lambda t: t[:2], lambda t: t.view(torch.int32), torch.zeros_like):
        tensor.data = change(kept)
        assert backend.view(backend.adopt([tensor], arrays)[0]).equal(tensor)


def test_arrays_whose_memory_was_taken_are_held_no_longer(backend):
    arrays = backend.put([torch.ones(64, 64)])
    program = compile_function(backend, "add", lambda a: [a + 1], [LARGE], donated=[0])
    (tensor,) = backend.publish(program(arrays), is_held=True)
    assert arrays[0].is_deleted()
    assert backend.view(backend.adopt([tensor], arrays)[0]).eq(2).all()


def test_forgotten_tensors_leave_nothing_behind(backend):
    gc.collect()
    before = num_noted(backend)
    tensors = [*backend.publish(backend.put([torch.zeros(8)] * 3)), torch.ones(8)]
    backend.adopt(tensors)
    assert num_noted(backend) == before + 4
    del tensors
    gc.collect()
    assert num_noted(backend) == before


def test_what_another_view_of_the_same_memory_holds_is_read_as_that_view_has_it(backend):
    values = torch.arange(16.0).reshape(4, 4)
    (tensor,) = backend.publish(backend.put([values]))
    waves = torch.complex(values, -values)
    (published,) = backend.publish(backend.put([waves]))
    for source, own in ((tensor, values), (published, waves)):
        for change in (torch.t, lambda t: t[:2], lambda t: t.flatten(), torch.conj):
            (array,) = backend.adopt([change(source)])
            assert backend.view(array).equal(change(own).resolve_conj())
    assert backend.view(backend.adopt([tensor.view(torch.int32)])[0]).equal(
        values.view(torch.int32)
    )


@pytest.mark.parametrize("is_published", [True, False])
def test_tensors_can_be_swapped(is_published, backend):
    (tensor,) = backend.publish(backend.put([torch.ones(8)]))
    tensor = tensor if is_published else torch.ones(8)
    backend.adopt([tensor])
    backend.forget([tensor])
    torch.utils.swap_tensors(tensor, torch.zeros(8))
    assert not backend.view(backend.adopt([tensor])[0]).any()


def test_parameters_that_got_memory_of_arrays_can_be_swapped(backend):
    parameter = torch.nn.Parameter(torch.ones(8))
    backend.adopt([parameter])
    backend.assign([parameter], backend.put([torch.full((8,), 2.0)]))
    assert backend.view(backend.adopt([parameter])[0]).eq(2).all()
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros(8)))
    assert not backend.view(backend.adopt([parameter])[0]).any()


def test_donated_memory_is_used_again(backend):
    program = compile_function(backend, "add", lambda a: [a + 1], [LARGE], donated=[0])
    state = compile_function(backend, "zeros", lambda a: [a * 0], [LARGE])(
        backend.put([torch.ones(64, 64)])
    )
    pointer = state[0].unsafe_buffer_pointer()
    (result,) = program(state)
    backend.wait()
    assert result.unsafe_buffer_pointer() == pointer and state[0].is_deleted()


def test_donation_leaves_tensors_that_users_see_alone(backend):
    program = compile_function(backend, "add", lambda a: [a + 1], [LARGE], donated=[0])
    tensor = torch.zeros(64, 64)
    (result,) = program(backend.adopt([tensor]))
    assert backend.view(result).eq(1).all() and not tensor.any()
    (seen,) = backend.publish([result])
    (again,) = program([result])
    assert backend.view(again).eq(2).all() and seen.eq(1).all()


def test_a_passed_on_argument_is_not_donated(backend):
    program = compile_function(backend, "pass", lambda a: [a, a + 1], [LARGE], donated=[0])
    same, more = program(backend.put([torch.zeros(64, 64)]))
    assert not backend.view(same).any() and backend.view(more).all()


def test_random_numbers_follow_from_the_seed(backend):
    def dropped(x):
        return [nn.functional.dropout(x, 0.5), torch.rand_like(x)]

    ones = torch.ones(1000)
    first, again = (run(backend, dropped, ones, seed=7) for _ in range(2))
    other = run(backend, dropped, ones, seed=8)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    assert 400 < (first[0] == 2).sum() < 600 and first[0].unique().numel() == 2
    # Two operators of one program draw different numbers.
    assert not torch.equal((first[0] > 0), (first[1] > 0.5))


def test_plugins_may_want_another_generator():
    rbg = PjrtBackend("cpu", key_kind="rbg")
    drawn = [run(rbg, lambda x: [torch.rand_like(x)], torch.ones(100), seed=3) for _ in range(2)]
    usual = run(PjrtBackend("cpu"), lambda x: [torch.rand_like(x)], torch.ones(100), seed=3)
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][0], usual[0])
    assert 0.3 < drawn[0][0].mean() < 0.7


def test_functions_that_write_in_place_are_made_functional(backend):
    def update(parameter, gradient):
        new = parameter.clone()
        new.add_(gradient, alpha=-0.5)
        new[:2].mul_(3)  # through a view
        return [new]

    parameter = torch.ones(4)
    (result,) = run(backend, update, parameter, torch.ones(4))
    assert result.tolist() == [1.5, 1.5, 0.5, 0.5] and parameter.eq(1).all()


@pytest.mark.parametrize("size", [(8, 4, 6), (96, 64, 80)])
def test_products_of_bfloat16_whose_left_operand_xla_transposes(backend, size):
    rows, left, right = size
    columns, weights = torch.randn(left, rows).bfloat16(), torch.randn(rows, left).bfloat16()
    other, back = torch.randn(rows, right).bfloat16(), torch.randn(left, right).bfloat16()

    def both(x, y, z, w):
        scaled = x.T * y
        return [scaled.T @ z, scaled @ w]

    found = run(backend, both, columns, weights, other, back)
    for value, wanted in zip(found, both(columns, weights, other, back), strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)


def test_marks_for_a_profiler_do_not_cut_a_program(backend):
    def update(parameter):
        with torch.autograd.profiler.record_function("step"):
            return [parameter + 1]

    program = compile_function(backend, "update", update, [VECTOR])
    assert isinstance(program, PjrtExecutable)
    assert backend.view(program(backend.put([torch.ones(4)]))[0]).eq(2).all()


def test_compilations_are_counted(backend):
    before = backend.num_compilations
    program = compile_function(backend, "count", lambda a: [a * 3], [VECTOR])
    assert backend.num_compilations == before + 1
    program(backend.put([torch.ones(4)]))
    compile_function(backend, "nothing", lambda a: [a], [VECTOR])
    assert backend.num_compilations == before + 1


def test_a_shape_that_depends_on_values_is_refused(backend):
    with pytest.raises(
        LoweringError, match=r"masked cannot be traced: .*Shapes must not depend on values"
    ):
        compile_function(backend, "masked", lambda a: [a[a > 0]], [VECTOR])


def test_what_xla_refuses_names_the_operator(backend):
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("a"),))
    node.meta["val"] = torch.empty(5, device="meta")
    graph.output([node])
    module = torch.fx.GraphModule(nn.Module(), graph)
    with pytest.raises(LoweringError, match=r"wrong: aten::exp .*shape \[4\] in place of \[5\]"):
        backend.compile("wrong", module, [VECTOR])


def test_an_unknown_operator_is_refused_by_name(backend):
    library = torch.library.Library("mpxla_tests", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    library.impl("nowhere", torch.empty_like, "Meta")  # and for no device that computes
    with pytest.raises(LoweringError, match=r"odd: mpxla_tests::nowhere .* no jax function"):
        compile_function(backend, "odd", lambda a: [torch.ops.mpxla_tests.nowhere(a)], [VECTOR])


def test_the_cpu_counts_no_memory(backend):
    assert backend.memory_counters() is None
    assert backend.is_host and backend.has_doubles and backend.device == torch.device("cpu")


def test_new_zeros_are_donated(backend):
    program = compile_function(backend, "add", lambda a, b: [a + b], [LARGE, LARGE], donated=[0])
    (ones,) = backend.put([torch.ones(64, 64)])
    for _ in range(2):
        first, other = backend.zeros([LARGE, LARGE])
        pointer = first.unsafe_buffer_pointer()
        (result,) = program([first, ones])
        assert backend.view(result).eq(1).all() and result.unsafe_buffer_pointer() == pointer
        assert first.is_deleted() and not backend.view(other).any()


class Full:
    """In place of a compiled program, as a device answers whose memory is full."""

    def __init__(self, program, text):
        self.program, self.text = program, text
        self.memory_analysis = program.memory_analysis

    def __call__(self, *arguments):
        raise jax.errors.JaxRuntimeError(self.text)


def test_full_memory_says_what_needs_it_and_what_holds_it(backend, monkeypatch):
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    gc.collect()
    program = compile_function(backend, "stage 1 backward", lambda a: [a + 1], [LARGE])
    held = backend.put([torch.zeros(512, 1024)] * 3)
    program._call = Full(program._call, "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    with pytest.raises(MpxlaError) as caught:
        program(backend.put([torch.zeros(64, 64)]))
    text = str(caught.value)
    assert text.startswith("rank 1: the memory of its device (cpu:0) is full, while stage 1 ")
    assert "16.0 KiB for its results, beside 16.0 KiB of arguments" in text
    assert f"6.00 MiB in {len(held)} x float32[512, 1024]\n" in text
    assert "Use smaller or more microbatches" in text
    assert text.endswith("The runtime says: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    program._call.text = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        program(backend.put([torch.zeros(64, 64)]))


def test_ranks_of_a_machine_have_a_device_each(monkeypatch):
    class Device:
        platform = "gpu"

    devices = [Device(), Device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert _find_device(None) is devices[0]
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    assert _find_device(None) is devices[1]
    for name, value in {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MpxlaError, match="would use gpu device 2 of its machine, which has 2"):
        _find_device(None)
    Device.platform = "cpu"
    assert _find_device(None) is devices[0]


def test_the_only_device_that_a_process_sees_is_its_own(monkeypatch):
    class Device:
        platform = "gpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [only])
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    only = Device()
    assert _find_device(None) is only


SCRIPT = """
import sys
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.errors import MpxlaError
for platform in (None, "tpu"):
    try:
        PjrtBackend(platform)
    except MpxlaError as error:
        print(error)
assert "torch_xla" not in sys.modules
"""


@pytest.mark.parametrize(
    ("asked", "platforms", "expected"), [("CUDA", None, 1), ("CUDA", "cpu", 0), ("CPU", None, 0)]
)
def test_who_asks_for_cuda_hears_of_the_cpu(asked, platforms, expected, monkeypatch):
    warned = []
    monkeypatch.setattr(get_logger(), "warning", warned.append)
    monkeypatch.setenv("PJRT_DEVICE", asked)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        PjrtBackend()
    finally:
        jax.config.update("jax_platforms", before)
    assert len(warned) == expected
    assert all("finds none: this process runs on the CPU" in text for text in warned)


@pytest.mark.slow
def test_missing_devices():
    """One process asks for what the environment names, and for a platform."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    named, asked = done.stdout.splitlines()
    assert "jax has no platform 'cuda' on this machine" in named
    assert "extra `cuda13` or `cuda12`" in named
    assert "jax has no platform 'tpu' on this machine" in asked and "jax[tpu]" in asked
