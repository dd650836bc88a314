"""The function of XLA's foreign function interface that multiplies by PyTorch's BLAS.

It is machine code, which LLVM makes of the text below: Python's lock is not taken, since who waits
for a program may hold it. A large product comes in parts, which threads of XLA's pool compute: the
library's own threads would be others, and both would want the same cores.
"""

import ctypes
import functools
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

__all__ = ["TARGET", "description", "has_part_calls", "register"]

TARGET = "mpxla_sgemm"
"""The function's name in programs. Its operands are two matrices and a `description`."""
_OLDEST_LLVM = 17
"""The first one whose pointers have no types."""
_SMALLEST_PART = 2**22
"""Multiplications of a part: 0.06 ms on a fast core. Another thread begins microseconds later."""
_MULTIPLE = 16
"""Rows or columns of a part: a multiple of a vector."""

# What XLA hands over is laid out by xla/ffi/api/c_api.h, which jaxlib brings along; it counts in
# words of 8 bytes here. `help` may begin when the product is there already, and what it was made of
# is gone: it reads nothing but the state until it has got a part.
_CODE = """
; columns and rows of the result, and the bytes before the right and left operand and the result
%Part = type { i64, i64, i64, i64, i64 }
; 0 and 1: letters of the operands, 2: inner, 3: one, 4 and 5: their rows, 6: zero or one to add,
; 7: the result's rows, 8: number of parts, 9: number of helpers
%Description = type { i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, [0 x %Part] }
; 0: next part, 1: parts that are done, 2: who holds this, 3: number of parts, 4: description,
; 5: right operand, 6: left operand, 7: result
%State = type { i64, i64, i64, i64, ptr, ptr, ptr, ptr }
%Schedule = type { i64, ptr, ptr, ptr, ptr }
%Destroy = type { i64, ptr, ptr }

declare void @sgemm_(ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr)
declare i32 @set_threads(i32)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()

define void @compute(ptr %state) {
start:
  %count.at = getelementptr %State, ptr %state, i32 0, i32 3
  %count = load i64, ptr %count.at
  %before = call i32 @set_threads(i32 1)
  br label %next
next:
  %i = atomicrmw add ptr %state, i64 1 acq_rel
  %is_there = icmp ult i64 %i, %count
  br i1 %is_there, label %part, label %end
part:
  %d.at = getelementptr %State, ptr %state, i32 0, i32 4
  %d = load ptr, ptr %d.at
  %right.at = getelementptr %State, ptr %state, i32 0, i32 5
  %right = load ptr, ptr %right.at
  %left.at = getelementptr %State, ptr %state, i32 0, i32 6
  %left = load ptr, ptr %left.at
  %result.at = getelementptr %State, ptr %state, i32 0, i32 7
  %result = load ptr, ptr %result.at
  %columns = getelementptr %Description, ptr %d, i32 0, i32 10, i64 %i, i32 0
  %rows = getelementptr %Description, ptr %d, i32 0, i32 10, i64 %i, i32 1
  %a.bytes.at = getelementptr %Description, ptr %d, i32 0, i32 10, i64 %i, i32 2
  %a.bytes = load i64, ptr %a.bytes.at
  %a = getelementptr i8, ptr %right, i64 %a.bytes
  %b.bytes.at = getelementptr %Description, ptr %d, i32 0, i32 10, i64 %i, i32 3
  %b.bytes = load i64, ptr %b.bytes.at
  %b = getelementptr i8, ptr %left, i64 %b.bytes
  %c.bytes.at = getelementptr %Description, ptr %d, i32 0, i32 10, i64 %i, i32 4
  %c.bytes = load i64, ptr %c.bytes.at
  %c = getelementptr i8, ptr %result, i64 %c.bytes
  %b.letter = getelementptr %Description, ptr %d, i32 0, i32 1
  %inner = getelementptr %Description, ptr %d, i32 0, i32 2
  %one = getelementptr %Description, ptr %d, i32 0, i32 3
  %a.row = getelementptr %Description, ptr %d, i32 0, i32 4
  %b.row = getelementptr %Description, ptr %d, i32 0, i32 5
  %factor = getelementptr %Description, ptr %d, i32 0, i32 6
  %c.row = getelementptr %Description, ptr %d, i32 0, i32 7
  call void @sgemm_(ptr %d, ptr %b.letter, ptr %columns, ptr %rows, ptr %inner, ptr %one,
                    ptr %a, ptr %a.row, ptr %b, ptr %b.row, ptr %factor, ptr %c, ptr %c.row)
  %done.at = getelementptr %State, ptr %state, i32 0, i32 1
  %done = atomicrmw add ptr %done.at, i64 1 acq_rel
  br label %next
end:
  %mine = call i32 @set_threads(i32 %before)
  ret void
}

define void @leave(ptr %state) {
  %holders.at = getelementptr %State, ptr %state, i32 0, i32 2
  %holders = atomicrmw sub ptr %holders.at, i64 1 acq_rel
  %is_last = icmp eq i64 %holders, 1
  br i1 %is_last, label %last, label %end
last:
  call void @free(ptr %state)
  br label %end
end:
  ret void
}

define void @help(ptr %state) {
  call void @compute(ptr %state)
  call void @leave(ptr %state)
  ret void
}

define ptr @call(ptr %frame) {
start:
  %task = alloca %Schedule
  %failure = alloca %Destroy
  %extension.at = getelementptr ptr, ptr %frame, i32 1
  %extension = load ptr, ptr %extension.at
  %api.at = getelementptr ptr, ptr %frame, i32 2
  %api = load ptr, ptr %api.at
  %is_question = icmp ne ptr %extension, null
  br i1 %is_question, label %version, label %multiply

version:  ; XLA asks for which version of the interface this is: its own
  %version.at = getelementptr i64, ptr %api, i32 4
  %number = load i64, ptr %version.at
  %metadata.at = getelementptr ptr, ptr %extension, i32 3
  %metadata = load ptr, ptr %metadata.at
  %answer = getelementptr i64, ptr %metadata, i32 3
  store i64 %number, ptr %answer
  ret ptr null

multiply:
  %arguments.at = getelementptr ptr, ptr %frame, i32 9
  %arguments = load ptr, ptr %arguments.at
  %results.at = getelementptr ptr, ptr %frame, i32 14
  %results = load ptr, ptr %results.at
  %left.buffer = load ptr, ptr %arguments
  %left.at = getelementptr ptr, ptr %left.buffer, i32 3
  %left = load ptr, ptr %left.at
  %right.buffer.at = getelementptr ptr, ptr %arguments, i32 1
  %right.buffer = load ptr, ptr %right.buffer.at
  %right.at = getelementptr ptr, ptr %right.buffer, i32 3
  %right = load ptr, ptr %right.at
  %d.buffer.at = getelementptr ptr, ptr %arguments, i32 2
  %d.buffer = load ptr, ptr %d.buffer.at
  %d.at = getelementptr ptr, ptr %d.buffer, i32 3
  %d = load ptr, ptr %d.at
  %result.buffer = load ptr, ptr %results
  %result.at = getelementptr ptr, ptr %result.buffer, i32 3
  %result = load ptr, ptr %result.at
  %count.at = getelementptr %Description, ptr %d, i32 0, i32 8
  %count = load i64, ptr %count.at
  %helpers.at = getelementptr %Description, ptr %d, i32 0, i32 9
  %helpers = load i64, ptr %helpers.at
  %holders = add i64 %helpers, 1
  %state = call ptr @malloc(i64 64)
  %state.0 = insertvalue %State zeroinitializer, i64 %holders, 2
  %state.1 = insertvalue %State %state.0, i64 %count, 3
  %state.2 = insertvalue %State %state.1, ptr %d, 4
  %state.3 = insertvalue %State %state.2, ptr %right, 5
  %state.4 = insertvalue %State %state.3, ptr %left, 6
  %state.5 = insertvalue %State %state.4, ptr %result, 7
  store %State %state.5, ptr %state
  %context.at = getelementptr ptr, ptr %frame, i32 3
  %context = load ptr, ptr %context.at
  %task.0 = insertvalue %Schedule zeroinitializer, i64 40, 0
  %task.1 = insertvalue %Schedule %task.0, ptr %context, 2
  %task.2 = insertvalue %Schedule %task.1, ptr @help, 3
  %task.3 = insertvalue %Schedule %task.2, ptr %state, 4
  store %Schedule %task.3, ptr %task
  %schedule.at = getelementptr ptr, ptr %api, i32 17
  %destroy.at = getelementptr ptr, ptr %api, i32 8
  br label %ask

ask:
  %asked = phi i64 [ 0, %multiply ], [ %asked.next, %schedule ], [ %asked.next, %refused ]
  %is_more = icmp ult i64 %asked, %helpers
  br i1 %is_more, label %schedule, label %work
schedule:
  %asked.next = add i64 %asked, 1
  %schedule.function = load ptr, ptr %schedule.at
  %error = call ptr %schedule.function(ptr %task)
  %is_error = icmp ne ptr %error, null
  br i1 %is_error, label %refused, label %ask
refused:  ; there is no pool: this thread computes everything
  %failure.0 = insertvalue %Destroy zeroinitializer, i64 24, 0
  %failure.1 = insertvalue %Destroy %failure.0, ptr %error, 2
  store %Destroy %failure.1, ptr %failure
  %destroy = load ptr, ptr %destroy.at
  call void %destroy(ptr %failure)
  call void @leave(ptr %state)
  br label %ask

work:
  call void @compute(ptr %state)
  %done.at = getelementptr %State, ptr %state, i32 0, i32 1
  br label %wait
wait:  ; for parts that others have begun
  %done = load atomic i64, ptr %done.at acquire, align 8
  %is_done = icmp eq i64 %done, %count
  br i1 %is_done, label %end, label %yield
yield:
  %yielded = call i32 @sched_yield()
  br label %wait
end:
  call void @leave(ptr %state)
  ret ptr null
}
"""
_NO_CHOICE = """
define i32 @set_threads(i32 %count) {
  ret i32 %count
}
"""


@functools.cache
def _library() -> ctypes.CDLL | None:
    file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(file)) if file.exists() else None


def _address(name: str) -> int | None:
    function = getattr(_library(), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def has_part_calls() -> bool:
    """Whether the library can be told to use the calling thread alone, for parts of a product."""
    return _address("MKL_Set_Num_Threads_Local") is not None


def register() -> bool:
    """Makes the function known to XLA; False if there is no library, or none to make code with."""
    if importlib.util.find_spec("llvmlite") is None:
        return False
    from llvmlite import binding

    addresses = {"sgemm_": _address("sgemm_"), "set_threads": _address("MKL_Set_Num_Threads_Local")}
    if addresses["sgemm_"] is None or binding.llvm_version_info[0] < _OLDEST_LLVM:
        return False
    code = _CODE
    if addresses["set_threads"] is None:
        code = code.replace("declare i32 @set_threads(i32)", _NO_CHOICE)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name, address in addresses.items():
        if address is not None:
            binding.add_symbol(name, address)
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code), machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address("call"))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(function), platform="cpu")
    return True


_ENGINES: list[Any] = []
"""What owns the machine code, which XLA knows by its address."""


def description(
    left: Sequence[int],
    right: Sequence[int],
    is_left: bool,
    is_right: bool,
    is_sum: bool,
    num_threads: int,
) -> Any:
    """What the function reads by address: int64 words, as `%Description` lists them.

    The library counts by columns, so it computes the transpose of the product, of the transposes.

    Args:
        left: shape of the left-hand operand in memory, with a batch dimension if it has three.
        right: that of the right-hand one.
        is_left: whether the product takes the transpose of the left-hand one.
        is_right: likewise.
        is_sum: whether the product is added to what the result holds.
        num_threads: threads of XLA's pool, of which as many compute parts at once.
    """
    inner, rows = left[-2:] if is_left else left[:-3:-1]
    columns = right[-2 if is_right else -1]
    count = left[0] if len(left) == 3 else 1
    size = rows * columns * inner
    by_rows = rows >= columns
    num_parts = min(-(-num_threads // count), size // _SMALLEST_PART)
    cuts = _cuts(rows if by_rows else columns, max(1, num_parts))
    parts: list[Sequence[int]] = []
    for batch in range(count):
        for first, last in itertools.pairwise(cuts):
            shape = (columns, last - first) if by_rows else (last - first, rows)
            row, column = (first, 0) if by_rows else (0, first)
            a = inner * columns * batch + column * (inner if is_right else 1)
            b = rows * inner * batch + row * (1 if is_left else inner)
            c = rows * columns * batch + row * columns + column
            parts.append((*shape, 4 * a, 4 * b, 4 * c))
    one, factor = np.array([1.0, is_sum], np.float32).view(np.int32)
    letters = [ord("NT"[is_right]), ord("NT"[is_left])]
    helpers = min(num_threads, len(parts), max(1, count * size // _SMALLEST_PART)) - 1
    head = [*letters, inner, one, right[-1], left[-1], factor, columns, len(parts), helpers]
    return np.array([*head, *itertools.chain.from_iterable(parts)], np.int64)


def _cuts(size: int, num_parts: int) -> list[int]:
    """Where parts of about equal size begin and end."""
    step = _MULTIPLE * max(1, -(-size // (_MULTIPLE * num_parts)))
    return [*range(0, size, step), size]
