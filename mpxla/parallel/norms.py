"""The norm of all gradients of a model, wherever they are, and clipping by it.

Every rank sums the powers of the gradients it owns (a tied parameter is counted by its first
holder, a divided one piece by piece), one small exchange brings the sums together, and the scale is
applied on the device. Two compiled programs; the host reads nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.reducer import GradientReducer
from mpxla.session import current
from mpxla.stage.compile import Executable, compile_graph
from mpxla.stage.device import make_ready, to_device
from mpxla.stage.spec import TensorSpec

__all__ = ["GradientNorm", "clip_grad_norm_"]

_EPSILON = 1e-6
"""What torch adds to the norm before it divides."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips gradients by their norm over all stages, replicas and shards. Extension of SMP's API.

    Like `torch.nn.utils.clip_grad_norm_` in one process: the norm is that of all gradients of the
    parameters given, as one vector, tied parameters counted once. Torch's own function does the
    same when it is given parameters of the model (see `torch_clipping`). Call it between the step
    function and `optimizer.step()`; all ranks of a replica must call it, and all ranks with
    `shard_optimizer_state`.

    Args:
        parameters: usually `model.parameters()`; the same selection on all ranks.
        max_norm: largest norm that stays.
        norm_type: order of the norm; `float("inf")` for the largest element.
        error_if_nonfinite: raise if the norm is inf or nan; the host waits for it then.

    Returns:
        The norm before clipping, a scalar on the device.

    Raises:
        MpxlaError: there is no `DistributedModel`, it is not partitioned yet, or it does not have
            some of the parameters.
        RuntimeError: `error_if_nonfinite`, as in torch.
        ValueError: `norm_type` is not positive.
    """
    model = current().model
    if model is None or not model.partitioned:
        raise MpxlaError(
            "smp.clip_grad_norm_ needs gradients: call it after the first call of a step function."
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; use a positive order, or float('inf').")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    strangers = model.gradient_norm.strangers(given)
    if strangers:
        raise MpxlaError(
            f"{len(strangers)} of the {len(given)} parameters to clip are not the distributed "
            f"model's (the first has shape {list(strangers[0].shape)}), so their gradients are not "
            f"in the norm over all ranks. Clip them in a call of their own, by "
            f"torch.nn.utils.clip_grad_norm_."
        )
    with model.together("clip_grad_norm_()", model.gradient_norm.ranks):
        norm = model.gradient_norm.clip(given, float(max_norm), float(norm_type))
    if error_if_nonfinite and not norm.isfinite().item():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot "
            f"be clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    return norm


class _Powers(nn.Module):
    """Sum of the powers [1] of all elements, or the largest magnitude."""

    def __init__(self, order: float):
        super().__init__()
        self._order = order

    def forward(self, *gradients: torch.Tensor) -> list[torch.Tensor]:
        if self._order == float("inf"):
            return [torch.stack([g.abs().max().float() for g in gradients]).max().reshape(1)]
        powers = [g.float().abs().pow(self._order).sum() for g in gradients]
        if self._order == 2.0:
            powers = [g.float().square().sum() for g in gradients]
        return [torch.stack(powers).sum().reshape(1)]


class _Scaling(nn.Module):
    """Sums of all ranks [n, 1] or [1], a limit and gradients to the norm and scaled gradients."""

    def __init__(self, order: float):
        super().__init__()
        self._order = order

    def forward(
        self, powers: torch.Tensor, limit: torch.Tensor, *gradients: torch.Tensor
    ) -> list[torch.Tensor]:
        if self._order == float("inf"):
            norm = powers.max()
        else:
            norm = powers.sum().pow(1.0 / self._order)
        scale = (limit / (norm + _EPSILON)).clamp(max=1.0)
        return [norm, *(g * scale.to(g.dtype) for g in gradients)]


class GradientNorm:
    """Norm and clipping of the gradients of one rank's model.

    Args:
        reducer: knows where gradients are.
        pipeline: global ranks that hold a replica.
        world: all ranks.
    """

    def __init__(self, reducer: GradientReducer, pipeline: Sequence[int], world: Sequence[int]):
        self._reducer = reducer
        self._pipeline = tuple(pipeline)
        self._world = tuple(world)
        self._programs: dict[Any, Executable] = {}
        self._limits: dict[float, torch.Tensor] = {}

    @property
    def is_divided(self) -> bool:
        """Whether the gradients of parameters are in pieces on their owners."""
        return self._reducer.shards is not None

    @property
    def is_spread(self) -> bool:
        """Whether there are gradients of the model that this rank does not hold."""
        return self.is_divided or len(self._pipeline) > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that have to clip together."""
        return self._world if self.is_divided else self._pipeline

    def strangers(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are no parameters of the model, here or elsewhere, and no pieces of one."""
        shards = self._reducer.shards
        known = {id(parameter) for parameter in self._reducer.replica.state.parameters.values()}
        if shards is not None:
            known |= {id(piece.parameter) for piece in shards.pieces()}
        return [parameter for parameter in parameters if id(parameter) not in known]

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What holds the gradients of some parameters on this rank."""
        return [owner for owner, _ in self._owners(parameters)]

    def clip(
        self, parameters: Sequence[torch.Tensor], max_norm: float, order: float
    ) -> torch.Tensor:
        """Scales the gradients of some parameters; see `clip_grad_norm_`."""
        replica = self._reducer.replica
        owners = self._owners(parameters)
        gradients = [owner.grad for owner, _ in owners if owner.grad is not None]
        counted = [owner.grad for owner, is_counted in owners if is_counted]
        counted = [gradient for gradient in counted if gradient is not None]
        make_ready(gradients)
        (powers,) = to_device([self._powers(counted, order)], replica.device)
        arguments = [powers, self._limit(max_norm), *gradients]
        norm, *scaled = self._program(_Scaling, order, arguments)(arguments)
        with_gradient = [owner for owner, _ in owners if owner.grad is not None]
        for owner, gradient in zip(with_gradient, scaled, strict=True):
            owner.grad = gradient
        return norm

    def total(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """Norm over all ranks of what each gives; a tied tensor is counted by its first holder.

        Args:
            tensors: parameters or gradients of this rank.
            order: of the norm.
        """
        replica = self._reducer.replica
        given = {id(tensor) for tensor in tensors}
        counted = [
            tensor
            for name, parameter in replica.state.local_parameters()
            if self._reducer.parameter_ranks[name][0] == replica.pp_rank
            for tensor in (parameter, parameter.grad)
            if tensor is not None and id(tensor) in given
        ]
        (powers,) = to_device([self._powers(counted, order)], replica.device)
        arguments = [powers, self._limit(0.0)]
        (norm,) = self._program(_Scaling, order, arguments)(arguments)
        return norm

    def covers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are all gradients of this rank, or all of its parameters; and no others."""
        given = {id(tensor) for tensor in tensors}
        held = [parameter for _, parameter in self._reducer.replica.state.local_parameters()]
        gradients = {id(p.grad) for p in held if p.grad is not None}
        return given in (gradients, {id(p) for p in held}, {id(p) for p in held if p.requires_grad})

    def knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some of these are parameters or gradients of this rank."""
        held = [parameter for _, parameter in self._reducer.replica.state.local_parameters()]
        known = {id(value) for p in held for value in (p, p.grad)}
        return any(id(tensor) in known for tensor in tensors)

    def _powers(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """Sums of powers [ranks, 1], or [1] where only this rank has any."""
        make_ready(tensors)
        powers = torch.zeros(1)
        if tensors:
            (powers,) = self._program(_Powers, order, tensors)(
                [tensor.detach() for tensor in tensors]
            )
        if len(self.ranks) > 1:
            powers = self._reducer.replica.transport.all_gather(powers, self.ranks).result()
        return powers

    def _owners(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """What holds gradients on this rank, and whether this rank counts them."""
        replica, shards = self._reducer.replica, self._reducer.shards
        wanted = {id(parameter) for parameter in parameters}
        owners: list[tuple[torch.Tensor, bool]] = []
        for name, parameter in replica.state.local_parameters():
            is_counted = self._reducer.parameter_ranks[name][0] == replica.pp_rank
            owner: torch.Tensor = parameter
            if shards is not None and name in shards:
                piece = shards.piece_of(name)
                if piece is None:
                    continue
                owner = piece.parameter
            if id(parameter) in wanted or id(owner) in wanted:
                owners.append((owner, is_counted))
        return owners

    def _limit(self, value: float) -> torch.Tensor:
        if value not in self._limits:
            device = self._reducer.replica.device
            (self._limits[value],) = to_device([torch.tensor(value)], device)
        return self._limits[value]

    def _program(
        self, kind: type[nn.Module], order: float, arguments: Sequence[torch.Tensor]
    ) -> Executable:
        specs = tuple(TensorSpec.of(argument) for argument in arguments)
        key = (kind, order, specs)
        if key not in self._programs:
            name = "norm of the gradients"
            device = self._reducer.replica.device
            self._programs[key] = compile_graph(name, kind(order), specs, device)
        return self._programs[key]
