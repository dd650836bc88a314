"""Tracing of a stage's function, alone or together with its derivative.

Functions are traced node by node on fake tensors of the device, with torch's own tracer. That is
what `aot_export_joint_simple` does as well, after a first pass over the function that finds out
what it mutates and what its results share, and under a mode that makes mutations functional. A
stage mutates nothing, and does not need either, which is nearly half of the time. A derivative that
is written with other mutations than `replace_writes` knows is traced that way.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_is_backward
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._functorch._aot_autograd.utils import copy_fwd_metadata_to_bw_nodes
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from mpxla.device.backend import Lowering
from mpxla.graph.casts import without_autocast
from mpxla.graph.shapes import static_shapes
from mpxla.stage.spec import TensorSpec
from mpxla.stage.writes import replace_writes

__all__ = ["trace_alone", "trace_joint"]

_Function = Callable[..., list[torch.Tensor]]


def trace_alone(
    function: _Function, inputs: Sequence[TensorSpec], lowering: Lowering
) -> fx.GraphModule:
    """Traces a function without its derivative.

    It takes one tensor per spec, and returns a list of tensors that share no memory.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = _fake(mode, inputs, lowering.device)
    with torch.no_grad(), mode, _dispatched(lowering, is_differentiated=False):
        module = make_fx(function, decomposition_table=lowering.decompositions())(*arguments)
        is_functional = replace_writes(module, lowering.decompositions())
    return module if is_functional else _trace_functional(function, arguments, False, lowering)


def trace_joint(
    function: _Function,
    inputs: Sequence[TensorSpec],
    differentiated: Sequence[int],
    tangents: Sequence[TensorSpec | None],
    lowering: Lowering,
) -> fx.GraphModule:
    """Traces such a function with its derivative, for torch's partitioner.

    A result without a gradient has None in place of a spec.

    Returns:
        (arguments, gradients of results) -> (results, gradient of every argument or None).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = _fake(mode, inputs, lowering.device, differentiated)
    has_gradient = [spec is not None for spec in tangents]
    seeds = _fake(mode, [spec for spec in tangents if spec is not None], lowering.device)

    def joint(
        primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        # The partitioner tells arguments and gradients apart by these two names.
        results = function(*primals)
        ends = [r for r, known in zip(results, has_gradient, strict=True) if known]
        pairs = [(e, t) for e, t in zip(ends, tangents, strict=True) if e.requires_grad]
        setup_stacktrace_preservation_hooks([end.grad_fn for end, _ in pairs])
        with set_partitioner_tag_is_backward(), preserve_node_meta():
            found = torch.autograd.grad(
                [end for end, _ in pairs],
                [primals[i] for i in differentiated],
                [tangent for _, tangent in pairs],
                allow_unused=True,
            )
        gradients: list[torch.Tensor | None] = [None] * len(primals)
        for index, gradient in zip(differentiated, found, strict=True):
            gradients[index] = gradient
        return results, gradients

    with (
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),  # a step function may have switched it on
        mode,
        _dispatched(lowering, is_differentiated=True),
    ):
        module = make_fx(joint, decomposition_table=lowering.decompositions())(arguments, seeds)
    with torch.no_grad(), mode:
        is_functional = replace_writes(module, lowering.decompositions())
    if not is_functional:
        return _trace_functional(function, arguments, True, lowering)
    copy_fwd_metadata_to_bw_nodes(module)
    return module


@contextlib.contextmanager
def _dispatched(lowering: Lowering, is_differentiated: bool) -> Generator[None]:
    """How operators find their kernels while they are traced."""
    with (
        without_autocast(),
        lowering.dispatched(is_differentiated),
        static_shapes(),
        enable_python_dispatcher(),
        preserve_node_meta(),
    ):
        yield


def _fake(
    mode: FakeTensorMode,
    specs: Sequence[TensorSpec],
    device: torch.device,
    differentiated: Sequence[int] = (),
) -> list[torch.Tensor]:
    with mode:
        return [
            torch.empty(s.shape, dtype=s.dtype, device=device, requires_grad=i in differentiated)
            for i, s in enumerate(specs)
        ]


def _trace_functional(
    function: _Function, arguments: list[torch.Tensor], is_joint: bool, lowering: Lowering
) -> fx.GraphModule:
    with torch.set_grad_enabled(is_joint), _dispatched(lowering, is_joint):
        return aot_export_joint_simple(
            function,
            arguments,
            trace_joint=is_joint,
            decompositions=dict(lowering.decompositions()),
        )
