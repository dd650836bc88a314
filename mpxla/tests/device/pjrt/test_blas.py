"""Products of large matrices by PyTorch's own library: the same numbers, and when it is used."""

import ctypes
import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.device.pjrt import blas, executable, sgemm
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.stage.spec import TensorSpec
from mpxla.tests.programs import texts_of_programs

pytestmark = pytest.mark.unit

if not blas.has_blas():
    pytest.skip("llvmlite, or PyTorch's sgemm_, is not there", allow_module_level=True)


@pytest.fixture(autouse=True)
def preferred(monkeypatch):
    """Also on processors where the library is the slower one."""
    monkeypatch.setattr(executable, "prefers_blas", blas.has_blas)


@pytest.fixture(scope="module")
def backend():
    return PjrtBackend("cpu")


def run(backend, function, *tensors, donated=()):
    """Results of a function compiled for jax, and the text of its program."""
    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in tensors]
    module = make_fx(function)(*tensors)
    with texts_of_programs() as texts:
        program = backend.compile("products", module, specs, donated)
    results = program(backend.put(list(tensors)))
    return [t.clone() for t in backend.get(results)], texts[0]


def check(backend, function, *tensors, calls, **options):
    expected = function(*tensors)
    results, text = run(backend, function, *tensors, **options)
    for value, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-4)
    assert text.count("stablehlo.custom_call @mpxla_sgemm") == calls, text
    return text


def oriented(matrix, is_transposed):
    """The same matrix, stored by columns if it is to be the transpose of an argument."""
    return matrix.mT.contiguous() if is_transposed else matrix


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_operands_may_be_transposed_and_batched(backend, is_left, is_right, batch):
    left = oriented(torch.randn(*batch, 96, 128), is_left)
    right = oriented(torch.randn(*batch, 128, 160), is_right)

    def product(a, b):
        return [(a.mT if is_left else a) @ (b.mT if is_right else b)]

    text = check(backend, product, left, right, calls=1)
    assert "stablehlo.transpose" not in text, "the library reads transposed operands as they lie"


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [((), 260, 96), ((), 64, 330), ((2,), 170, 40), ((7,), 64, 48)]
)
def test_products_come_in_parts_for_several_threads(
    backend, is_left, is_right, batch, rows, columns, monkeypatch
):
    """More threads than there are: parts are computed by who comes first."""
    monkeypatch.setattr(blas, "xla_threads", lambda: 5)
    monkeypatch.setattr(blas, "_SMALLEST", 1)
    monkeypatch.setattr(sgemm, "_SMALLEST_PART", 2**16)
    left, right = torch.randn(*batch, rows, 80), torch.randn(*batch, 80, columns)
    found = sgemm.description(left.shape, right.shape, False, False, False, 5)
    assert found[8] == {(): 5, (2,): 6, (7,): 7}[batch] and found[9] == 4
    check(
        backend,
        lambda a, b: [(a.mT if is_left else a) @ (b.mT if is_right else b)] * 2,
        oriented(left, is_left),
        oriented(right, is_right),
        calls=1,
    )
    if not batch:
        total = torch.randn(rows, columns)
        check(backend, lambda t, a, b: [t + a @ b], total, left, right, calls=1)


def test_without_a_pool_one_thread_computes_all_parts():
    """The function is called as XLA does, by an interface that refuses to schedule."""
    left, right, result = torch.randn(64, 32), torch.randn(32, 48), torch.empty(64, 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgemm, "_SMALLEST_PART", 2**10)
        numbers = sgemm.description(left.shape, right.shape, False, False, False, 4)
    assert numbers[8:10].tolist() == [4, 3]
    destroyed, word = list[int](), ctypes.c_void_p
    refuse = ctypes.CFUNCTYPE(word, word)(lambda task: 4711)
    destroy = ctypes.CFUNCTYPE(None, ctypes.POINTER(word))(lambda of: destroyed.append(of[2]))

    def words(length, **at):
        return (word * length)(*(at.get(f"_{i}") for i in range(length)))

    api = words(30, _8=ctypes.cast(destroy, word), _17=ctypes.cast(refuse, word))
    buffers = [words(6, _3=a) for a in (left.data_ptr(), right.data_ptr(), numbers.ctypes.data)]
    arguments = (word * 3)(*map(ctypes.addressof, buffers))
    out = words(6, _3=result.data_ptr())
    results = (word * 1)(ctypes.addressof(out))
    at = {2: api, 9: arguments, 14: results}
    frame = words(20, **{f"_{i}": ctypes.addressof(value) for i, value in at.items()})
    call = ctypes.CFUNCTYPE(word, word)(sgemm._ENGINES[0].get_function_address("call"))
    assert call(ctypes.addressof(frame)) is None
    assert destroyed == [4711] * 3
    torch.testing.assert_close(result, left @ right, rtol=1e-5, atol=1e-4)


def test_a_linear_layer_and_its_derivative(backend):
    weight, bias = torch.randn(192, 128), torch.randn(192)
    x, gradient = torch.randn(96, 128), torch.randn(96, 192)

    def layer(weight, bias, x, gradient):
        y = torch.addmm(bias, x, weight.t())
        return [y, gradient @ weight, gradient.t() @ x]

    check(backend, layer, weight, bias, x, gradient, calls=3)


def test_gradients_are_added_where_they_lie(backend):
    total, x, gradient = torch.randn(128, 192), torch.randn(96, 128), torch.randn(96, 192)

    def accumulate(total, x, gradient):
        return [total + (x.t() @ gradient).to(torch.float32)]

    expected = accumulate(total, x, gradient)
    text = check(backend, accumulate, total, x, gradient, calls=1)
    assert "stablehlo.add" not in text and "output_operand_aliases" in text
    (value,), _ = run(backend, accumulate, total.clone(), x, gradient, donated=(0,))
    torch.testing.assert_close(value, expected[0], rtol=1e-5, atol=1e-4)


def test_who_reads_the_sum_or_the_product_as_well_gets_it(backend):
    total, x, y = torch.randn(128, 128), torch.randn(128, 96), torch.randn(96, 128)

    def both(total, x, y):
        product = x @ y
        return [total + product, product * 2, total * 3]

    check(backend, both, total, x, y, calls=1)

    def reread(total, x, y):
        return [total + x @ y, total * 3]

    check(backend, reread, total, x, y, calls=1)  # XLA copies what is read later


def test_scaled_sums_and_other_types_stay_products_of_xla(backend):
    start, x, y = torch.randn(128, 128), torch.randn(128, 96), torch.randn(96, 128)
    check(backend, lambda s, x, y: [torch.addmm(s, x, y, beta=2)], start, x, y, calls=0)
    check(backend, lambda s, x, y: [torch.addmm(s, x, y, alpha=2)], start, x, y, calls=0)
    check(backend, lambda x, y: [x @ y], x.double(), y.double(), calls=0)
    check(backend, lambda x, y: [x @ y], x[:16], y, calls=0)  # small: XLA may fuse it
    x, y = x.bfloat16(), y.bfloat16()
    (value,), text = run(backend, lambda x, y: [x @ y], x, y)
    assert "mpxla_sgemm" not in text
    torch.testing.assert_close(value, x @ y, rtol=1e-2, atol=0.2)


def test_sums_of_other_shapes_and_types_are_added_afterwards(backend):
    x, y = torch.randn(128, 96), torch.randn(96, 128)
    check(backend, lambda row, x, y: [row + x @ y], torch.randn(128), x, y, calls=1)
    check(backend, lambda s, x, y: [s + x @ y], torch.randn(128, 128).double(), x, y, calls=1)
    check(backend, lambda x, y: [x @ y + x @ y], x, y, calls=2)
    wide = torch.randn(128, 128).double()
    check(backend, lambda s, x, y: [s + (x @ y).double()], wide, x, y, calls=1)


def test_a_batch_may_be_empty(backend):
    x, y = torch.randn(0, 128, 96), torch.randn(0, 96, 128)
    check(backend, lambda x, y: [torch.bmm(x, y)], x, y, calls=0)


def test_without_llvmlite_programs_multiply_as_xla_does(backend, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(importlib.util, "find_spec", lambda name: None)
        assert not blas.has_blas.__wrapped__()
    monkeypatch.setattr(executable, "prefers_blas", lambda: False)
    x = torch.randn(128, 128)
    check(backend, lambda x: [x @ x], x, calls=0)


@pytest.mark.parametrize(
    ("capability", "processor", "is_preferred"),
    [
        ("AVX512", "vendor_id : GenuineIntel", True),
        ("AVX512", "vendor_id : AuthenticAMD", False),
        ("AVX2", "vendor_id : AuthenticAMD", True),
        ("NO AVX", "", True),
    ],
)
def test_processors_on_which_the_library_is_preferred(
    capability, processor, is_preferred, monkeypatch
):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(blas, "_capability", lambda: capability)
    monkeypatch.setattr(blas, "_processor", lambda: processor)
    assert blas.prefers_blas.__wrapped__() == is_preferred
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert blas.prefers_blas.__wrapped__()
    monkeypatch.setattr(blas, "has_blas", lambda: False)
    assert not blas.prefers_blas.__wrapped__()


SCRIPT = """
import sys, torch
from torch.fx.experimental.proxy_tensor import make_fx
from mpxla.device.pjrt import blas, executable, sgemm
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.stage.spec import TensorSpec
from mpxla.kept import open_kept
from mpxla.tests.programs import texts_of_programs
executable.prefers_blas = blas.has_blas
backend = PjrtBackend("cpu")
kept = open_kept(sys.argv[1], backend.machine)
backend.keep_programs(kept)
x = torch.arange(128 * 128.0).view(128, 128) / 1e4
module = make_fx(lambda x: [x @ x])(x)
program = backend.compile("product", module, [TensorSpec((128, 128), torch.float32)])
(value,) = backend.get(program(backend.put([x])))
torch.testing.assert_close(value, x @ x)
print("found", kept.num_found)
"""


@pytest.mark.slow
def test_a_program_that_calls_the_library_is_found_on_disk(tmp_path):
    """A second process runs what the first one has compiled."""
    for found in (0, 1):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"found {found}" in done.stdout, done.stderr
