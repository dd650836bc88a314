"""Gradients and start values over data-parallel replicas.

Gradients travel in flat buckets of one dtype; several buckets are under way at a time. Start values
are those of the first replica, and of the first holder of a shared parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpxla.comm.packing import pack, unpack
from mpxla.parallel.state import ModelState
from mpxla.runtime.link import PipelineLink
from mpxla.stage.device import make_ready, to_device
from mpxla.stage.spec import TensorSpec

__all__ = ["GradientReducer", "fill_buckets"]


def fill_buckets(
    sizes: Mapping[str, tuple[torch.dtype, int]], capacity_bytes: int
) -> list[list[str]]:
    """Groups names into buckets of one dtype that hold at most `capacity_bytes` (or one tensor).

    Args:
        sizes: name -> (dtype, bytes); every rank passes equal values in equal order.
        capacity_bytes: largest bucket.
    """
    buckets: list[list[str]] = []
    open_buckets: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, (dtype, num_bytes) in sizes.items():
        names, filled = open_buckets.get(dtype, ([], 0))
        if not names or filled + num_bytes > capacity_bytes:
            names, filled = [], 0
            buckets.append(names)
        names.append(name)
        open_buckets[dtype] = (names, filled + num_bytes)
    return buckets


class GradientReducer:
    """Reduces the gradients of one rank's parameters over its data-parallel group.

    Args:
        transport: the session's transport.
        group: global ranks that hold the same parameters.
        device: this rank's device.
        bucket_cap_mb: largest bucket in MiB.
        backward_passes_per_step: step calls whose gradients are summed before a reduction.
    """

    def __init__(
        self,
        transport: Any,
        group: Sequence[int],
        device: torch.device,
        bucket_cap_mb: float = 25,
        backward_passes_per_step: int = 1,
    ):
        self._transport = transport
        self._group = tuple(group)
        self._device = device
        self._capacity_bytes = int(bucket_cap_mb * 2**20)
        self._passes_per_step = backward_passes_per_step
        self._pass = 0

    def finish(self, state: ModelState, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds a step's gradients to `param.grad`, averaged over replicas.

        All ranks of the group must call it after every training step.
        """
        self._pass += 1
        is_last = self._pass % self._passes_per_step == 0
        totals = dict(gradients)
        if self._passes_per_step > 1:
            for name, value in gradients.items():
                earlier = state.parameters[name].grad
                totals[name] = value if earlier is None else earlier + value
        if len(self._group) > 1 and is_last:
            make_ready(totals.values())
            totals = self._mean(totals)
        for name, value in totals.items():
            parameter = state.parameters[name]
            if self._passes_per_step > 1 or parameter.grad is None:
                parameter.grad = value
            else:
                parameter.grad = parameter.grad + value
        make_ready(totals.values())

    def _mean(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = {n: (g.dtype, g.numel() * g.itemsize) for n, g in gradients.items()}
        buckets = fill_buckets(sizes, self._capacity_bytes)
        under_way = []
        for names in buckets:
            host = [gradients[name].cpu().reshape(-1) for name in names]
            under_way.append(self._transport.all_reduce(torch.cat(host), self._group))
        result: dict[str, torch.Tensor] = {}
        for names, handle in zip(buckets, under_way, strict=True):
            total = handle.result().div_(len(self._group))
            parts = total.split([gradients[name].numel() for name in names])
            shaped = [p.view(gradients[n].shape) for n, p in zip(names, parts, strict=True)]
            result.update(zip(names, to_device(shaped, self._device), strict=True))
        return result

    def equalize(
        self,
        state: ModelState,
        parameter_ranks: Mapping[str, tuple[int, ...]],
        pp_rank: int,
        link: PipelineLink,
    ) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values.

        All ranks must call it once, when parameters have been placed.
        """
        local = {**dict(state.local_parameters()), **state.buffers}
        names = [n for n in sorted(local) if pp_rank in parameter_ranks[n]]
        if len(self._group) > 1 and names:
            packed = pack([local[name].detach().cpu() for name in names])
            packed = self._transport.broadcast(packed, self._group[0], self._group).result()
            specs = [TensorSpec.of(local[n]) for n in names]
            self._store(state, names, unpack(packed, specs))
        self._equalize_shared(state, parameter_ranks, pp_rank, link)

    def _equalize_shared(
        self,
        state: ModelState,
        parameter_ranks: Mapping[str, tuple[int, ...]],
        pp_rank: int,
        link: PipelineLink,
    ) -> None:
        local = {**dict(state.local_parameters()), **state.buffers}
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(parameter_ranks):
            if len(parameter_ranks[name]) > 1:
                groups.setdefault(parameter_ranks[name], []).append(name)
        for (first, *others), names in sorted(groups.items()):
            if pp_rank == first:
                for rank in others:
                    link.send_to(rank, [local[name].detach() for name in names], "tied")
            elif pp_rank in others:
                specs = [TensorSpec.of(local[name]) for name in names]
                self._store(state, names, link.receive_from(first, specs, "tied")())

    def _store(
        self, state: ModelState, names: Sequence[str], values: Sequence[torch.Tensor]
    ) -> None:
        for name, value in zip(names, values, strict=True):
            if name in state.parameters:
                state.parameters[name].data = value.to(self._device)
            else:
                state.set_buffer(name, value.to(self._device))
