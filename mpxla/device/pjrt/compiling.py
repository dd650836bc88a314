"""XLA's compiler, with the options that its programs for the CPU want."""

import re
from typing import Any

import jax

__all__ = ["CPU", "compile_lowered", "told"]

CPU: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
"""XLA's 256 bits take twice as long for GELU where 512 are there."""

_YNN_MULTIPLIES: dict[str, Any] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}
"""The library YNN gets products, and no reductions with what is fused with them.

jaxlib 0.10.2 computes those wrongly with values of fewer than 32 bits: of 8,192 values in bfloat16,
`log(x * 0.5).astype(float32).mean()` is another number each time. In float32 they are right, and
steps of a small ViT are 12 % faster by them.
"""

_NARROW = re.compile(r"[<x](?:bf16|f16|f8\w*|u?i(?:4|8|16))>")
"""Tensors of such types in StableHLO."""

_WITHOUT_YNN: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Products of bfloat16 are converted to float32, in place of being left to the library YNN."""


def told(platform: str) -> str:
    """What the compiler may be told for a kind of device, as a part of keys."""
    return repr((CPU, _YNN_MULTIPLIES, _WITHOUT_YNN)) if platform == "cpu" else ""


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles a program; raises what XLA raises."""
    if platform != "cpu":
        return lowered.compile()
    compiled = lowered.compile(CPU | _YNN_MULTIPLIES if _has_narrow_values(lowered) else CPU)
    return lowered.compile(CPU | _WITHOUT_YNN) if _has_bare_products(compiled) else compiled


def _has_narrow_values(lowered: jax.stages.Lowered) -> bool:
    """Whether any value has fewer than 32 bits, but for truth values, which YNN does not take."""
    module: Any = lowered.compiler_ir("stablehlo")
    return _NARROW.search(module.operation.get_asm(large_elements_limit=1)) is not None


def _has_bare_products(compiled: jax.stages.Compiled) -> bool:
    """Whether the program multiplies in bfloat16 outside what a library computes: it cannot run.

    On processors with instructions for bfloat16, XLA keeps products for YNN in that dtype, and
    folds transposes into them afterwards: `(x.T * y).T @ z` sums over the rows of its left operand
    then. YNN does not take that, XLA's own code takes no bfloat16, and the call fails.
    """
    executable = compiled.runtime_executable()
    return executable is not None and any(
        instruction.opcode.name == "kDot"
        and any(" = bf16[" in operand.to_string() for operand in instruction.operands())
        for module in executable.hlo_modules()
        for computation in module.make_nonfusion_computations()
        for instruction in computation.instructions()
    )
