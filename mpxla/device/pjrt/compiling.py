"""XLA's compiler, with the options that its programs for the CPU want."""

from typing import Any

import jax

__all__ = ["CPU", "compile_lowered", "told"]

CPU: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
"""XLA's 256 bits take twice as long for GELU where 512 are there."""

_WITHOUT_YNN: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Products of bfloat16 are converted to float32, in place of being left to the library YNN."""


def told(platform: str) -> str:
    """What the compiler may be told for a kind of device, as a part of keys."""
    return repr((CPU, _WITHOUT_YNN)) if platform == "cpu" else ""


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles a program; raises what XLA raises."""
    if platform != "cpu":
        return lowered.compile()
    compiled = lowered.compile(CPU)
    return lowered.compile(CPU | _WITHOUT_YNN) if _has_bare_products(compiled) else compiled


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
