"""The norm of all gradients of a model, wherever they are, and clipping by it.

Every rank sums the powers of the gradients it owns (a tied parameter is counted by its first
holder, a divided one piece by piece, a split one part by part), one small exchange brings the sums
together, and the scale is applied on the device. Two compiled programs; the host reads nothing.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from mpxla.comm.transport import Transport
from mpxla.device.backend import Backend, Buffer
from mpxla.errors import MpxlaError
from mpxla.parallel.gradients.in_scripts import own_gradient
from mpxla.parallel.gradients.lent import gradient_here
from mpxla.parallel.gradients.reducer import GradientReducer
from mpxla.parallel.programs import Programs, wide_dtype
from mpxla.parallel.store import ParameterStore, exchange_gradients
from mpxla.session import current

__all__ = ["GradientNorm", "clip_grad_norm_"]

_NAME = "norm of the gradients"
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
        parameters: usually `model.parameters()`; the same selection on all ranks, of one model or
            of several.
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
    models = current().models
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if models is None or models.gradient_norm.is_too_early(given):
        raise MpxlaError(
            "smp.clip_grad_norm_ needs gradients: call it after the first call of a step function "
            "that uses the model."
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; use a positive order, or float('inf').")
    norms = models.gradient_norm
    # Layers that were put into a model since its last step have no gradients: nothing to count.
    strangers = [parameter for parameter in norms.strangers(given) if parameter.grad is not None]
    if strangers:
        raise MpxlaError(
            f"{len(strangers)} of the {len(given)} parameters to clip are not the distributed "
            f"model's (the first has shape {list(strangers[0].shape)}), so their gradients are not "
            f"in the norm over all ranks. Clip them in a call of their own, by "
            f"torch.nn.utils.clip_grad_norm_."
        )
    with models.together("clip_grad_norm_()", norms.ranks):
        models.unscale()
        norm = norms.clip(given, float(max_norm), float(norm_type))
    if error_if_nonfinite and not norm.isfinite().item():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot "
            f"be clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    return norm


def _power_sums(order: float, dtype: torch.dtype, *gradients: torch.Tensor) -> list[torch.Tensor]:
    """Sum of the powers [1] of all elements, or the largest magnitude; in a dtype for all ranks."""
    if order == float("inf"):
        return [torch.stack([g.abs().max().to(dtype) for g in gradients]).max().reshape(1)]
    # Of complex numbers the magnitudes count.
    real = [g.abs() if g.is_complex() else g for g in gradients]
    values = [g if g.dtype == torch.float64 else g.float() for g in real]
    powers = [v.square() if order == 2.0 else v.abs().pow(order) for v in values]
    return [torch.stack([power.sum().to(dtype) for power in powers]).sum().reshape(1)]


def _scaled(
    order: float,
    dtype: torch.dtype,
    powers: torch.Tensor,
    limit: torch.Tensor,
    *gradients: torch.Tensor,
) -> list[torch.Tensor]:
    """Sums of all ranks [n, 1] or [1], a limit and gradients to the norm and scaled gradients."""
    norm = powers.max() if order == float("inf") else powers.sum().pow(1.0 / order)
    scale = (limit / (norm + _EPSILON)).clamp(max=1.0)
    return [norm.to(dtype), *(g * scale.to(g.dtype) for g in gradients)]


class GradientNorm:
    """Norm and clipping of the gradients of one rank's models, which may become more.

    A replica's ranks have their own parts of split parameters. `counts` says of a model's label and
    a parameter's name whether this rank counts it, among those that share the tensors of its
    partition.
    """

    def __init__(
        self,
        reducers: Iterable[GradientReducer],
        transport: Transport,
        backend: Backend,
        replica: Sequence[int],
        world: Sequence[int],
        counts: Callable[[str, str], bool],
    ):
        self._reducers = reducers
        self._transport = transport
        self._backend = backend
        self._replica = tuple(replica)
        self._world = tuple(world)
        self._counts = counts
        self._programs = Programs(backend)
        self._dtype = wide_dtype(backend)

    @property
    def _placed(self) -> list[ParameterStore]:
        """Parameters of the models that are placed."""
        stores = [reducer.replica.store for reducer in self._reducers]
        return [store for store in stores if store.state.is_placed]

    @property
    def has_copies(self) -> bool:
        """Whether gradients of some parameters are on update copies instead."""
        return any(store.has_copies for store in self._placed)

    @property
    def is_spread(self) -> bool:
        """Whether there are gradients of some model that its parameters here do not hold."""
        return bool(self._placed) and (self.has_copies or len(self._replica) > 1)

    def is_too_early(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all are of models that are not placed, or gradients of some."""
        states = [reducer.replica.state for reducer in self._reducers]
        waiting = {id(p) for s in states if not s.is_placed for p in s.parameters.values()}
        early = [p for p in parameters if id(p) in waiting]
        is_nothing_else = bool(early) and len(early) == len(parameters)
        return not self._placed or is_nothing_else or any(p.grad is not None for p in early)

    @property
    def is_divided(self) -> bool:
        """Whether replicas have different parts of some gradients; the same on all ranks."""
        return any(store.is_divided for store in self._placed)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that have to clip together."""
        return self._world if self.is_divided else self._replica

    def start(self) -> None:
        """Starts what torch's operators left pending of gradients, all in one program.

        torch_xla 2.9 takes two pending computations for the same if they differ only in which of
        several alike tensors stands where. Read one after the other, gradients that were scaled by
        their common norm would all be the first of their shape.
        """
        self._backend.flush()

    def strangers(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are no parameters of a model, here or elsewhere, and no copies of one."""
        known: set[int] = set()
        for store in self._placed:
            known |= {id(p) for p in store.state.parameters.values()}
            known |= {id(copy.parameter) for copy in store.copies()}
        return [parameter for parameter in parameters if id(parameter) not in known]

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What holds the gradients of some parameters on this rank."""
        return [owner for owner, _ in self._owners(parameters)]

    def clip(
        self, parameters: Sequence[torch.Tensor], max_norm: float, order: float
    ) -> torch.Tensor:
        """Scales the gradients of some parameters; see `clip_grad_norm_`."""
        # What a parameter shows of another model's copies is theirs.
        owners = [(o, is_counted, own_gradient(o)) for o, is_counted in self._owners(parameters)]
        counted = [
            gradient for _, is_counted, gradient in owners if is_counted and gradient is not None
        ]
        limit = self._programs.number(max_norm, self._dtype)
        given = [*self._backend.put([self._powers(counted, order)]), limit]
        del counted  # what somebody sees is not donated
        dtype, found = _dtype_of_norm(parameters), list[Buffer]()

        def scaled(gradients: Sequence[Buffer]) -> list[Buffer]:
            donated = range(len(given), len(given) + len(gradients))
            arguments = [*given, *gradients]
            norm, *values = self._programs.run(_NAME, _scaled, (order, dtype), arguments, donated)
            found.append(norm)
            return values

        with_gradient = [owner for owner, _, gradient in owners if gradient is not None]
        del owners
        exchange_gradients(with_gradient, self._backend, scaled)
        return self._backend.publish(found)[0]

    def total(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """Norm over all ranks of the parameters or gradients that each gives.

        A tied tensor is counted by its first holder.
        """
        ids = {id(tensor) for tensor in tensors}
        counted = [
            tensor
            for parameter, is_counted in self._owners(self._held())
            for tensor in (parameter, gradient_here(parameter))
            if is_counted and tensor is not None and id(tensor) in ids
        ]
        (powers,) = self._backend.put([self._powers(counted, order)])
        given = [powers, self._programs.number(0.0, self._dtype)]
        settings = order, _dtype_of_norm(tensors)
        (norm,) = self._programs.run(_NAME, _scaled, settings, given)
        return self._backend.publish([norm])[0]

    def covers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are all gradients, or parameters, that this rank has of some models.

        None at all may be those of a model of which it has none.
        """
        given = {id(tensor) for tensor in tensors}
        kinds = zip(*map(_ids, self._placed), strict=True)
        if not given:
            return any(not ids for of_models in kinds for ids in of_models)
        meant = ([i for i in of_models if not given.isdisjoint(i)] for of_models in kinds)
        return any(given == set().union(*ids) for ids in meant)

    def knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some of these are parameters, update copies or gradients of this rank."""
        copies = [copy.parameter for store in self._placed for copy in store.copies()]
        known = {id(value) for p in (*self._held(), *copies) for value in (p, gradient_here(p))}
        return any(id(tensor) in known for tensor in tensors)

    def _powers(self, tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """Sums of powers [ranks, 1], or [1] where only this rank has any."""
        powers: Buffer = torch.zeros(1, dtype=self._dtype)
        if tensors:
            settings, given = (order, self._dtype), self._backend.adopt(tensors)
            (powers,) = self._programs.run(_NAME, _power_sums, settings, given)
        if len(self.ranks) > 1:
            powers = self._transport.all_gather(powers, self.ranks).result()
        return powers

    def _held(self) -> list[nn.Parameter]:
        """Parameters of this rank, of all models that are placed."""
        return [p for store in self._placed for _, p in store.state.local_parameters()]

    def _owners(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
        """What holds gradients on this rank, and whether this rank counts them."""
        for store in self._placed:
            store.collect_gradients()
        wanted = {id(parameter) for parameter in parameters}
        found: dict[int, tuple[torch.Tensor, bool]] = {}
        for reducer in self._reducers:
            pp_rank, store = reducer.replica.pp_rank, reducer.replica.store
            for name, parameter in store.state.local_parameters() if store.state.is_placed else ():
                owner = store.owner(name)
                if owner is not None and not wanted.isdisjoint((id(parameter), id(owner))):
                    is_first = store.ranks[name][0] == pp_rank
                    found[id(owner)] = owner, is_first and self._counts(reducer.label, name)
        return list(found.values())


def _ids(store: ParameterStore) -> tuple[set[int], set[int], set[int]]:
    """Of gradients that a model has on this rank, of its parameters, and of those it trains."""
    held = [parameter for _, parameter in store.state.local_parameters()]
    gradients = {id(g) for p in held if (g := gradient_here(p)) is not None}
    return gradients, {id(p) for p in held}, {id(p) for p in held if p.requires_grad}


def _dtype_of_norm(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """What PyTorch gives, but for 16 bits, whose norm is in float32."""
    is_double = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    return torch.float64 if is_double else torch.float32
