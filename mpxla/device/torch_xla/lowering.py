"""How stages are lowered for torch_xla: on fake tensors of its device, with its corrections."""

import contextlib
from collections.abc import Generator

import torch
from torch import fx

from mpxla.device.backend import Lowering
from mpxla.device.convolution import expand_convolutions
from mpxla.device.torch_xla.operators.composition import composed_derivatives, host_shapes
from mpxla.device.torch_xla.operators.decompositions import DECOMPOSITIONS, REPLACEMENTS
from mpxla.device.torch_xla.operators.linear_algebra import correct_factorizations
from mpxla.device.torch_xla.operators.promotion import (
    keep_types,
    widen_convolutions,
    widen_sums,
)
from mpxla.device.torch_xla.operators.reductions import expand_reductions

__all__ = ["make_lowering"]


def make_lowering(is_host: bool) -> Lowering:
    """What torch_xla wants of graphs, for the processor itself or not; touches no device."""
    return Lowering(
        device=torch.device("xla:0"),  # the kind of device counts; nothing is allocated there
        decompositions=lambda: DECOMPOSITIONS,
        replacements=REPLACEMENTS,
        dispatched=_dispatched,
        expand=_expand_for_host if is_host else _correct,
        lays_out_weights=is_host,
        disguises_sums=is_host,
    )


@contextlib.contextmanager
def _dispatched(is_differentiated: bool) -> Generator[None]:
    with composed_derivatives(is_differentiated), host_shapes():
        yield


def _correct(module: fx.GraphModule) -> None:
    """What torch_xla computes otherwise than PyTorch."""
    correct_factorizations(module)
    keep_types(module)
    widen_sums(module)


def _expand_for_host(module: fx.GraphModule) -> None:
    """Also what only XLA's CPU backend compiles or runs slowly."""
    _correct(module)
    widen_convolutions(module)
    expand_convolutions(module)
    expand_reductions(module)
