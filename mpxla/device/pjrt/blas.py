"""Products of matrices by the BLAS that PyTorch brings, in XLA's programs for the CPU.

XLA's own products of float32 run at 0.6 to 0.9 of that library's rate (benchmarks/products.py), and
they are three quarters of a transformer's step. A program calls the library by XLA's foreign
function interface, from machine code that LLVM makes: Python's lock is not taken, since who waits
for a program may hold it. Without llvmlite, with a PyTorch that exports no `sgemm_`, and where the
library is slower (`prefers_blas`), programs multiply as XLA does.
"""

import ctypes
import functools
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from mpxla.graph.typed import arguments_of, input_of
from mpxla.stage.cleanup import replace_call

__all__ = ["has_blas", "prefers_blas", "use_blas"]

_aten = torch.ops.aten
_SMALLEST = 2**20
"""Multiplications of a matrix from which on the library is faster than what XLA fuses."""
_TARGET = "mpxla_sgemm"


@functools.cache
def has_blas() -> bool:
    """Whether programs can call the library; registers the function with XLA."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if importlib.util.find_spec("llvmlite") is None or not library.exists():
        return False
    sgemm = getattr(ctypes.CDLL(str(library)), "sgemm_", None)
    address = None if sgemm is None else ctypes.cast(sgemm, ctypes.c_void_p).value
    if address is None:
        return False
    handler = jax.ffi.pycapsule(_handler(address))
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


@functools.cache
def prefers_blas() -> bool:
    """Whether programs shall call the library: where it can be called, and is faster than XLA.

    Intel's library keeps to AVX2 on processors of others. Where those have AVX-512, XLA is faster:
    140 to 190 GFLOP/s to 100, on a core of an AMD EPYC. To time both would be no rule: runs on one
    machine have to give the same numbers.
    """
    has_wide = torch.backends.mkl.is_available() and _capability() == "AVX512"
    return not (has_wide and "GenuineIntel" not in _processor()) and has_blas()


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _processor() -> str:
    """What Linux says of the processors; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def _handler(sgemm: int) -> int:
    """Address of a function that XLA calls with its frame (xla/ffi/api/c_api.h, counted in words).

    It does no more than follow pointers to the library's function at the address `sgemm`:
    `_numbers` has what the library is told by address.
    """
    from llvmlite import binding, ir

    word = ir.IntType(64)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(word, [word]), "call")
    start, version, multiply, loop, end = map(
        function.append_basic_block, ("start", "version", "multiply", "loop", "end")
    )
    build: Any = ir.IRBuilder(start)  # llvmlite has no types

    def place(address: ir.Value, index: int) -> ir.Value:
        return build.inttoptr(build.add(address, word(8 * index)), word.as_pointer())

    def read(address: ir.Value, *indices: int) -> ir.Value:
        for index in indices:
            address = build.load(place(address, index))
        return address

    frame = function.args[0]
    extension = read(frame, 1)
    build.cbranch(build.icmp_unsigned("!=", extension, word(0)), version, multiply)
    build.position_at_end(version)  # XLA asks for which version of the interface this is: its own
    build.store(read(frame, 2, 4), place(read(extension, 3), 3))
    build.ret(word(0))
    build.position_at_end(multiply)
    left, right, numbers = (read(frame, 9, i, 3) for i in range(3))
    result = read(frame, 14, 0, 3)
    steps, count = [read(numbers, i) for i in (10, 11, 12)], read(numbers, 13)
    build.branch(loop)
    build.position_at_end(loop)
    at = [build.phi(word) for _ in range(4)]
    for value, first in zip(at, (word(0), left, right, result), strict=True):
        value.add_incoming(first, multiply)
    index, a, b, c = at
    told = [build.add(numbers, word(8 * i)) for i in range(10)]
    type_of_sgemm = ir.FunctionType(ir.VoidType(), [word] * 13)
    build.call(
        build.inttoptr(word(sgemm), type_of_sgemm.as_pointer()),
        [*told[:6], b, told[6], a, told[7], told[8], c, told[9]],
    )
    for value, step in zip(at, (word(1), *steps), strict=True):
        value.add_incoming(build.add(value, step), loop)
    build.cbranch(build.icmp_unsigned("<", build.add(index, word(1)), count), loop, end)
    build.position_at_end(end)
    build.ret(word(0))

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return engine.get_function_address("call")


_ENGINES: list[Any] = []
"""What owns the machine code, which XLA knows by its address."""


def _numbers(
    left: Sequence[int], right: Sequence[int], is_left: bool, is_right: bool, is_sum: bool
) -> Any:
    """What the library reads by address, in 14 words; shapes are those in memory.

    It counts by columns, so it computes the transpose of the product, of the transposes.
    """
    inner, rows = left[-2:] if is_left else left[:-3:-1]
    columns = right[-2 if is_right else -1]
    one, factor = np.array([1.0, is_sum], np.float32).view(np.int32)
    letters = [ord("NT"[is_right]), ord("NT"[is_left])]
    leading = [right[-1], left[-1]]
    steps = [4 * rows * inner, 4 * inner * columns, 4 * rows * columns]
    count = left[0] if len(left) == 3 else 1
    numbers = [*letters, columns, rows, inner, one, leading[0], leading[1], factor, columns]
    return np.array([*numbers, *steps, count], np.int64)


def use_blas(module: fx.GraphModule) -> None:
    """Lets products of large matrices be the library's, transposed operands with them; in place."""
    graph = module.graph
    for node in list(graph.nodes):
        bias, operands = _operands(node)
        if len(operands) != 2 or not _is_large(*operands):
            continue
        total = None if bias is not None else _sum_with(node)
        last = node if total is None else total
        with graph.inserting_before(last):
            (left, is_left), (right, is_right) = (_before_transposition(graph, n) for n in operands)
            start = (
                None
                if total is None
                else next(n for n in arguments_of(total) if n.op == "placeholder")
            )
            arguments = (left, right, is_left, is_right, start)
        if bias is None:
            replace_call(last, _product, arguments)
            continue
        with graph.inserting_before(node):
            product = graph.call_function(_product, arguments)
        product.meta = dict(node.meta)
        replace_call(node, _aten.add.Tensor, (product, bias))
    graph.eliminate_dead_code()


def _operands(node: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """What is added to a product, if anything, and its factors; none if it is no product."""
    if node.target in (_aten.mm.default, _aten.bmm.default):
        return None, arguments_of(node)
    if node.target in (_aten.addmm.default, _aten.baddbmm.default) and not node.kwargs:
        return input_of(node), arguments_of(node)[1:3]
    return None, ()


def _sum_with(node: fx.Node) -> fx.Node | None:
    """The sum of a product and an argument of the program, if nothing else reads the product.

    So gradients are added up where they lie. Other summands would have to be copied first.
    """
    users = list(node.users)
    if len(users) == 1 and users[0].target == _aten._to_copy.default:  # to float32, from that
        node, users = users[0], list(users[0].users)
    if len(users) != 1 or users[0].target != _aten.add.Tensor or users[0].kwargs:
        return None
    others = [n for n in users[0].args if n is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op != "placeholder":
        return None
    values = others[0].meta["val"], node.meta["val"]
    is_same = values[0].shape == values[1].shape
    return users[0] if is_same and all(v.dtype == torch.float32 for v in values) else None


def _is_large(left: fx.Node, right: fx.Node) -> bool:
    values = left.meta["val"], right.meta["val"]
    size = math.prod(values[0].shape[-2:]) * values[1].shape[-1]
    has_any = all(v.numel() for v in values)  # a batch may be empty
    return has_any and size >= _SMALLEST and all(v.dtype == torch.float32 for v in values)


def _before_transposition(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, bool]:
    """A matrix, or the matrix that it is the transpose of; of batches likewise."""
    value, found = node.meta["val"], node
    # Batches with several dimensions are expanded by nothing and then made one dimension.
    while found.target in _BATCHING and _has_matrices(input_of(found), value):
        found = input_of(found)
    if not _is_transposition(found):
        return node, False
    source = input_of(found)
    if found is node:
        return source, True
    shape = [*value.shape[:-2], value.shape[-1], value.shape[-2]]
    view = graph.call_function(_aten.view.default, (source, shape))
    view.meta["val"] = value.mT
    return view, True


_BATCHING = (
    *(_aten.expand.default, _aten.clone.default, _aten.reshape.default),
    *(_aten.view.default, _aten._unsafe_view.default),
)


def _has_matrices(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the matrices of a value are these, whatever its batches are."""
    of = node.meta["val"]
    return of.ndim >= 2 and of.shape[-2:] == value.shape[-2:] and of.numel() == value.numel()


def _is_transposition(node: fx.Node) -> bool:
    if node.target == _aten.t.default:
        return True
    rank = node.meta["val"].ndim
    if node.target == _aten.transpose.int:
        return {dim % rank for dim in arguments_of(node)[1:]} == {rank - 2, rank - 1}
    if node.target == _aten.permute.default:
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        return rank >= 2 and [dim % rank for dim in arguments_of(node)[1]] == swapped
    return False


def _product(
    left: jax.Array, right: jax.Array, is_left: bool, is_right: bool, start: jax.Array | None
) -> jax.Array:
    """The product of two matrices or of their transposes, added to `start` if there is one."""
    shape = (*left.shape[:-2], left.shape[-1 if is_left else -2])
    shape += (right.shape[-2 if is_right else -1],)
    numbers = _numbers(left.shape, right.shape, is_left, is_right, start is not None)
    arguments = (left, right, jnp.asarray(numbers))
    call = functools.partial(jax.ffi.ffi_call, _TARGET, jax.ShapeDtypeStruct(shape, jnp.float32))
    if start is None:
        return call()(*arguments)
    return call(input_output_aliases={3: 0})(*arguments, start)
