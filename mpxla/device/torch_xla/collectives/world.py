"""What torch_xla says of the world, where its devices do not reach each other.

torch_xla's CPU client knows one process: `xr.world_size()` is 1 and `xm.all_reduce` does nothing,
so that a script written for torch_xla would train every replica on all data. From `smp.init` to
`smp.shutdown` its names speak of the job's processes, and its collectives go over the host.

The collectives are exchanged where torch_xla's Python calls into C++: its public functions read
those names at each call, so it does not matter how a script imported them. Programs of the `xla`
transport are traced by the original functions (`xla_programs.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch._subclasses import FakeTensor

from mpxla.comm.transport import Transport
from mpxla.env import set_variables
from mpxla.errors import MpxlaError
from mpxla.graph.exchanged import exchanged

__all__ = ["XlaWorld"]

_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    xm.REDUCE_SUM: lambda parts: parts.sum(dim=0, dtype=parts.dtype),
    xm.REDUCE_MUL: lambda parts: parts.prod(dim=0, dtype=parts.dtype),
    xm.REDUCE_AND: lambda parts: functools.reduce(torch.bitwise_and, parts),
    xm.REDUCE_OR: lambda parts: functools.reduce(torch.bitwise_or, parts),
    xm.REDUCE_MIN: lambda parts: parts.amin(dim=0),
    xm.REDUCE_MAX: lambda parts: parts.amax(dim=0),
}
_Groups = Sequence[Sequence[int]]
_Run = Callable[..., torch.Tensor]


class XlaWorld:
    """torch_xla's view of the job, from construction until `close`.

    Args:
        transport: reaches the other processes, on the host.
        local_rank: this process among those of its host.
        local_size: processes of this host.
        has_reduced: whether gradients of an optimizer's parameters are reduced by mpxla, so that
            `xm.optimizer_step` must not reduce them once more.
    """

    def __init__(
        self,
        transport: Transport,
        local_rank: int,
        local_size: int,
        has_reduced: Callable[[torch.optim.Optimizer], bool],
    ):
        self._transport = transport
        self._world = tuple(range(transport.world_size))
        self._has_reduced = has_reduced
        self._undo = contextlib.ExitStack()
        self._describe(local_rank, local_size)
        called: dict[str, Callable[..., Any]] = {
            "all_reduce": self._all_reduce,
            "all_reduce_inplace": self._all_reduce_inplace,
            "all_to_all": self._all_to_all,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "collective_permute": self._permute,
            "send": functools.partial(_refuse, "send"),
            "recv": functools.partial(_refuse, "recv"),
        }
        for form, run in _FORMS.items():
            called[f"all_gather{form}"] = functools.partial(run, self._all_gather)
            called[f"reduce_scatter{form}"] = lambda kind, *rest, run=run: run(
                functools.partial(self._scattered, kind), *rest
            )
        self._exchange(_xla, **{f"_xla_{name}": function for name, function in called.items()})

    def close(self) -> None:
        """Gives torch_xla its own names back."""
        self._undo.close()

    def _describe(self, local_rank: int, local_size: int) -> None:
        rank, size = self._transport.rank, self._transport.world_size
        # The functions read these globals, once they are set.
        self._exchange(xr, _WORLD_SIZE=size, _ORDINAL=rank, global_device_count=lambda: size)
        self._exchange(
            _xla, _xla_get_process_index=lambda: rank, _xla_get_num_processes=lambda: size
        )
        local = {"PJRT_LOCAL_PROCESS_RANK": local_rank, "PJRT_LOCAL_PROCESS_COUNT": local_size}
        before = set_variables({name: str(value) for name, value in local.items()})
        self._undo.callback(set_variables, before)
        gradients = xm._fetch_gradients  # pyright: ignore[reportPrivateUsage]
        self._exchange(xm, _fetch_gradients=lambda o: [] if self._has_reduced(o) else gradients(o))

    def _exchange(self, owner: Any, **values: Any) -> None:
        self._undo.enter_context(exchanged(owner, **values))

    # --- collectives ----------------------------------------------------------------------------

    def _gathered(self, value: torch.Tensor, groups: _Groups) -> torch.Tensor:
        """The tensors of all members of the own group, [members, ...], on the host.

        All ranks take part, whatever the groups: nobody has to make process groups for them.
        """
        if isinstance(value, FakeTensor):
            raise MpxlaError("a collective of torch_xla was called while a step is traced.")
        host = value.detach().cpu().contiguous()
        everyone = self._transport.all_gather(host, self._world).result()
        return everyone[list(self._members(groups))] if groups else everyone

    def _members(self, groups: _Groups) -> Sequence[int]:
        if not groups:
            return self._world
        for group in groups:
            if self._transport.rank in group:
                return group
        raise MpxlaError(
            f"rank {self._transport.rank} is in none of the groups {[list(g) for g in groups]} of "
            f"a collective of torch_xla. Give groups that cover all ranks."
        )

    def _position(self, groups: _Groups) -> int:
        return list(self._members(groups)).index(self._transport.rank)

    def _reduced(
        self, kind: str, value: torch.Tensor, scale: float, groups: _Groups
    ) -> torch.Tensor:
        result = _REDUCTIONS[kind](self._gathered(value, groups))
        return result if scale == 1.0 else result * scale

    def _all_reduce(
        self, kind: str, value: torch.Tensor, scale: float, groups: _Groups, *_: Any
    ) -> torch.Tensor:
        return self._reduced(kind, value, scale, groups).to(value.device)

    def _all_reduce_inplace(
        self, kind: str, values: Sequence[torch.Tensor], scale: float, groups: _Groups, *_: Any
    ) -> None:
        with torch.no_grad():
            for value in values:
                value.copy_(self._reduced(kind, value, scale, groups))

    def _all_gather(
        self, value: torch.Tensor, dim: int, count: int, groups: _Groups, *_: Any
    ) -> torch.Tensor:
        parts = self._gathered(value, groups)
        return torch.cat(tuple(parts), dim=dim).to(value.device)

    def _scattered(
        self,
        kind: str,
        value: torch.Tensor,
        scale: float,
        dim: int,
        count: int,
        groups: _Groups,
        *_: Any,
    ) -> torch.Tensor:
        parts = self._reduced(kind, value, scale, groups).chunk(count, dim)
        return parts[self._position(groups)].to(value.device)

    def _reduce_scatter(
        self, kind: str, value: torch.Tensor, token: Any, *rest: Any
    ) -> tuple[torch.Tensor, Any]:
        return self._scattered(kind, value, *rest), token

    def _all_to_all(
        self,
        value: torch.Tensor,
        token: Any,
        split_dim: int,
        concat_dim: int,
        count: int,
        groups: _Groups,
        *_: Any,
    ) -> tuple[torch.Tensor, Any]:
        mine = self._position(groups)
        parts = [p.chunk(count, split_dim)[mine] for p in self._gathered(value, groups)]
        return torch.cat(parts, dim=concat_dim).to(value.device), token

    def _permute(
        self, value: torch.Tensor, token: Any, pairs: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Any]:
        everyone = self._gathered(value, ())
        sources = [source for source, target in pairs if target == self._transport.rank]
        received = everyone[sources[0]] if sources else torch.zeros_like(everyone[0])
        return received.to(value.device), token


def _into(run: _Run, out: torch.Tensor, value: torch.Tensor, token: Any, *rest: Any) -> Any:
    out.copy_(run(value, *rest))
    return token


def _each(run: _Run, values: Sequence[torch.Tensor], token: Any, *rest: Any) -> list[Any]:
    return [*(run(value, *rest) for value in values), token]


def _each_into(
    run: _Run,
    outs: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    token: Any,
    *rest: Any,
) -> Any:
    for out, value in zip(outs, values, strict=True):
        out.copy_(run(value, *rest))
    return token


_FORMS = {"_out": _into, "_coalesced": _each, "_coalesced_out": _each_into}
"""Ending of torch_xla's name for a collective -> how that form calls the plain one."""


def _refuse(name: str, *_: Any) -> Any:
    raise MpxlaError(
        f"xm.{name} needs programs that reach other processes, which those of this device do not. "
        f"Use smp.send and smp.recv_from, or torch.distributed.{name}."
    )
