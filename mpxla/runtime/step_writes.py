"""What a step writes to the tensors of models is theirs when it has run.

new values      of buffers and parameters: what the last microbatch has left
scaled rows     of embeddings (`max_norm`): Every rank that holds a table writes the rows that
                any microbatch of any replica has read, as one process would that reads the
                whole batch. An evaluation step, which replicas need not call together, writes
                those of its own batch where there is one replica, and none where there are more
derived         plain attributes that hooks compute of parameters
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mpxla.comm.objects import Objects
from mpxla.comm.transport import Group
from mpxla.device.backend import Backend, Buffer
from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import StepGraph
from mpxla.log import warn_once
from mpxla.runtime.control import as_announced
from mpxla.runtime.model_watch import ModelView
from mpxla.runtime.states import ModelStates

__all__ = ["StepWrites", "copy_held", "set_derived"]


def copy_held(values: dict[Any, Buffer], held: Iterable[Buffer], backend: Backend) -> None:
    """Puts copies in the place of values that are held by others as well."""
    ids = set(map(id, held))
    for key, value in values.items():
        if id(value) in ids:
            (values[key],) = backend.put(backend.get([value]))


class StepWrites:
    """Those of one captured step."""

    def __init__(
        self,
        step: StepGraph,
        states: ModelStates,
        backend: Backend,
        objects: Objects,
        replicas: Group,
    ):
        self._results, self._changed = step.scaled_tables, step.changed
        self._states, self._backend = states, backend
        self._objects, self._replicas = objects, replicas
        self._writes = step.is_training or len(replicas) == 1
        written = {*self._results, *step.changed}
        for name in sorted(written & states.shards.keys() if written else ()):
            is_scaled = name in self._results
            what = "scales rows of" if is_scaled else "writes to"
            how = " in place (nn.Embedding(max_norm=...))" if is_scaled else ""
            remedy = "Leave max_norm out" if is_scaled else "Write to it between step calls"
            text = (
                f"the step {what} {name}{how}, whose values are divided over ranks "
                f"(sharded_data_parallel_degree). {remedy}, or keep it whole: a larger "
                f"sdp_param_persistence_threshold."
            )
            raise as_announced(CaptureError(text))  # all ranks find it
        for name in self._results:
            warn_once(
                f"max_norm of {name}",
                f"{name} has a max_norm: every step call waits for its programs, to write the rows "
                f"that it has scaled.",
            )

    def keep(
        self, names: Collection[str], given: Mapping[str, Buffer], values: Mapping[str, Buffer]
    ) -> None:
        """Gives buffers and parameters on this rank their new values, after the last action.

        A step may leave what it was given. Other ranks forget what scripts have put there.
        """
        for name in self._changed.difference(names):
            self._states.forget_buffer(name)
        # A program may give an argument as its result: that stays the memory of its own tensor.
        new = {n: values[n] for n in names if values[n] is not given.get(n)}
        copy_held(new, given.values(), self._backend)
        tensors = {name: self._states.tensor(name) for name in new}
        parameters = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter)}
        if parameters:
            self._backend.assign(list(parameters.values()), [new[name] for name in parameters])
        buffers = [name for name in tensors if name not in parameters]
        if not buffers:
            return
        published = self._backend.publish([new[name] for name in buffers])
        for name, value in zip(buffers, published, strict=True):
            self._states.set_buffer(name, value)

    def scale_rows(self, fetch: Callable[[int], list[torch.Tensor]]) -> None:
        """Scales the rows on this rank; all ranks call it after the step, training or not."""
        if not (self._results and self._writes):
            return
        found = {
            name: torch.stack([self._backend.view(t) for t in fetch(index)]).amin(0)
            for name, index in self._results.items()
        }
        everyone = [found]
        if len(self._replicas) > 1:
            everyone = self._objects.allgather(found, self._replicas)
        for name in found:
            scale = torch.stack([one[name] for one in everyone]).amin(0)
            label, own = self._states.own_name(name)
            parameter = self._states[label].parameters[own]
            if not parameter.is_meta and bool((scale < 1).any()):
                with torch.no_grad():
                    parameter.mul_(scale.to(parameter.device))


def set_derived(view: ModelView) -> None:
    """Sets the attributes that hooks of PyTorch compute of parameters before every forward.

    `layer.weight` of a pruned layer is one (`torch.nn.utils.prune`, and `weight_norm` and
    `spectral_norm` beside it). A captured step runs no hooks, and scripts read the attribute: to
    log how many weights are zero, or to prune once more. So it is set after every step, from the
    values that the step has read.
    """
    for index, kind, _ in view.hooks:
        if kind == "_forward_pre_hooks" and index >= 0:
            module: Any = view.modules[index]
            for hook in module._forward_pre_hooks.values():
                _set(module, hook)


def _set(module: nn.Module, hook: Any) -> None:
    with torch.no_grad():
        if isinstance(hook, BasePruningMethod):
            name: str = hook._tensor_name  # pyright: ignore[reportPrivateUsage]
            setattr(module, name, hook.apply_mask(module))
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            setattr(module, hook.name, _normed(module, hook))


def _normed(module: nn.Module, hook: WeightNorm | SpectralNorm) -> torch.Tensor:
    is_weight = isinstance(hook, WeightNorm)
    source: torch.Tensor = getattr(module, f"{hook.name}_{'v' if is_weight else 'orig'}")
    vectors = (getattr(module, f"{hook.name}_{name}", source) for name in "uv")
    if any(tensor.is_meta for tensor in (source, *vectors)):  # some of it is on another rank
        return torch.empty_like(source.detach(), device="meta")
    if isinstance(hook, WeightNorm):
        return hook.compute_weight(module)
    return hook.compute_weight(module, do_power_iteration=False)  # the step has left the vectors
