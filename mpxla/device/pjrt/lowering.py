"""How stages are lowered for jax: on fake tensors of the processor, in plain operators."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpxla.device.backend import Lowering
from mpxla.device.convolution import expand_convolutions
from mpxla.device.pjrt.graphs import inline_functions, traced_decompositions
from mpxla.graph.recurrent import LAYER, looped
from mpxla.stage.replacements import SHARED

__all__ = ["make_lowering"]


def make_lowering(is_host: bool) -> Lowering:
    """What the backend wants of graphs, for the processor itself or not; touches no device.

    Not the device `meta`: it has no kernels for some derivatives (that of `nll_loss`).
    """
    lowering = Lowering(
        device=torch.device("cpu"),
        decompositions=traced_decompositions,
        replacements={**SHARED, LAYER: looped},
        dispatched=_plain_operators,
    )
    return replace(lowering, expand=_expand_for_host) if is_host else lowering


@contextlib.contextmanager
def _plain_operators(is_differentiated: bool) -> Generator[None]:
    """Attention as products and softmax, and none of the processor's own fused kernels."""
    # Not `mkldnn.flags`: it sets what only Intel's GPUs have, too, and warns of that.
    set_flags: Any = torch.backends.mkldnn.set_flags
    was_enabled, *_ = set_flags(_enabled=False, _fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        set_flags(_enabled=was_enabled, _fp32_precision=None)


def _expand_for_host(module: fx.GraphModule) -> None:
    """What XLA's CPU compiler makes slow code of; its reductions and sums are as fast as ours.

    Other devices have convolutions of their own.
    """
    expand_convolutions(module)
    inline_functions(module)
