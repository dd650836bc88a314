"""How fast products of matrices are in jax's programs on the CPU, next to eager PyTorch.

    python benchmarks/products.py

The products of a linear layer and of its derivative at the sizes of the GPT, one core: with XLA's
own code, with the library that programs call (`mpxla/device/pjrt/blas.py`), and by PyTorch. All
three take turns; the best of the repetitions counts.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.device.pjrt import blas, executable
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.stage.spec import TensorSpec

NUM_CALLS = 16
"""Products of one program, so that its start does not count."""
LAYERS = [(256, 384, 1536), (256, 1536, 384), (256, 384, 1152), (256, 384, 384), (256, 384, 4096)]
"""Tokens of a microbatch, inputs and outputs."""
FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x w^T": lambda x, w: x @ w.t(),
    "dy w": lambda dy, w: dy @ w,
    "dy^T x": lambda dy, x: dy.t() @ x,
}


def shapes(form: str, tokens: int, inputs: int, outputs: int) -> tuple[tuple[int, int], ...]:
    """Of the two operands."""
    x, w, dy = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    return {"x w^T": (x, w), "dy w": (dy, w), "dy^T x": (dy, x)}[form]


def compiled(backend: PjrtBackend, module: fx.GraphModule, specs: list[TensorSpec]) -> Callable:
    """The program, called with host tensors that are uploaded once."""
    program = backend.compile("products", module, specs)
    given = backend.put([torch.randn(spec.shape) for spec in specs])

    def call() -> None:
        results = program(given)
        backend.get(results[-1:])

    return call


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA starts its threads
    if not blas.has_blas():
        raise SystemExit("llvmlite is not installed: there is only one way to compare")
    backend = PjrtBackend("cpu")
    print("| product | tokens, inputs, outputs | XLA, GFLOP/s | library | eager PyTorch |")
    print("|---|---|---|---|---|")
    for layer in LAYERS:
        for form, function in FORMS.items():
            left, right = shapes(form, *layer)
            specs = [TensorSpec(left, torch.float32)] * NUM_CALLS
            specs.append(TensorSpec(right, torch.float32))
            tensors = [torch.randn(spec.shape) for spec in specs]

            def many(*given: torch.Tensor, function: Callable = function) -> list[torch.Tensor]:
                return [function(x, given[-1]) for x in given[:-1]]

            runs = [lambda many=many, tensors=tensors: many(*tensors)]
            for has_blas in (lambda: False, blas.has_blas):
                executable.prefers_blas = has_blas
                runs.insert(-1, compiled(backend, make_fx(many)(*tensors), specs))
            best = [float("inf")] * len(runs)
            for _ in range(args.repetitions):
                for i, run in enumerate(runs):
                    started = time.perf_counter()
                    run()
                    best[i] = min(best[i], time.perf_counter() - started)
            flops = 2 * layer[0] * layer[1] * layer[2] * NUM_CALLS
            rates = " | ".join(f"{flops / seconds / 1e9:.0f}" for seconds in best)
            print(f"| {form} | {', '.join(map(str, layer))} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
