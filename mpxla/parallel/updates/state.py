"""The state of an optimizer before its first step: what it starts from, and counters shared.

An optimizer is found out about by trying a copy of it on a few numbers; it stays as it is.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mpxla.device.backend import Backend
from mpxla.parallel.updates.trace import clone_optimizer
from mpxla.random_states import random_kept
from mpxla.stage.spec import TensorSpec

__all__ = [
    "counts_of",
    "dtypes_of_start",
    "idles_without_gradients",
    "makes_such_state",
    "share_counters",
    "start_from_zeros",
    "starts_from_zeros",
]

_VALUES = (0.3, -0.7, 1.1, 0.9, -0.2, 0.4)
"""Of parameters on which optimizers are tried."""

_LARGE = 1 << 16
"""Bytes from which zeros are made by a program. The first update takes their memory for what it
computes, and not that of PyTorch's tensors, beside which it would have as much again. (The program
compiles longer the more tensors it makes, so it makes no small ones.)"""

_State = Mapping[torch.Tensor, dict[str, Any]]


def share_counters(
    states: _State, new: Sequence[torch.Tensor], backend: Backend, counts: Collection[str]
) -> None:
    """Gives parameters with the same count of steps one tensor for it, on their device.

    Counters on the host are those of a loaded state; counters of `new` parameters are all zero.
    `counts` is what `counts_of` says.
    """
    shared: dict[tuple[str, float], torch.Tensor] = {}  # moments of scalars by what they are
    fresh = set(map(id, new))
    for parameter, state in states.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 0:
                continue
            if id(parameter) in fresh:
                if key in counts:
                    state[key] = shared.setdefault((key, 0.0), value)
            elif not backend.is_on_device(value) and backend.is_on_device(parameter):
                number = (key, value.item() if key in counts else id(value))
                if number not in shared:
                    (shared[number],) = backend.publish(backend.put([value]))
                state[key] = shared[number]


def counts_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The entries of a parameter's state that are one number, whatever its gradients are.

    Counts of steps are. NovoGrad's mean of the gradient's norm is not, nor are the moments of a
    parameter that is one number itself (a temperature, a scale): parameters cannot share those.
    """
    try:
        _, state = _tried(optimizer, (3,), torch.float32, None)
        _, other = _tried(optimizer, (3,), torch.float32, None, factor=3.0)
        _, before = _tried(optimizer, (3,), torch.float32, None, num_steps=1)
    except Exception:  # an optimizer may raise anything on what it was not written for
        return frozenset({"step"})
    numbers = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
    # What has not moved may begin to later, as an estimate that only grows.
    return frozenset(
        k
        for k in numbers
        if torch.equal(state[k], other[k]) and not torch.equal(state[k], before[k])
    )


def start_from_zeros(
    states: dict[torch.Tensor, dict[str, Any]],
    new: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
    backend: Backend,
    counts: Collection[str],
) -> None:
    """Gives new parameters the state that they start from.

    Args:
        states: of all parameters.
        new: for each, what a vector's state is like; see `starts_from_zeros`.
        backend: of the device.
        counts: what `counts_of` says.
    """
    found = [
        (p, key, TensorSpec(_shape_of_start(start, p), _dtype(start, key in counts)))
        for p, like in new.items()
        for key, start in like.items()
    ]
    states |= {parameter: dict.fromkeys(like) for parameter, like in new.items() if like}
    large = [entry for entry in found if entry[2].num_bytes >= _LARGE]
    small = [entry for entry in found if entry[2].num_bytes < _LARGE]
    values = [torch.zeros(spec.shape, dtype=spec.dtype) for _, _, spec in small]
    buffers = backend.zeros([spec for _, _, spec in large]) + backend.put(values, owned=True)
    published = backend.publish(buffers)
    for (parameter, key, _), value in zip(large + small, published, strict=True):
        states[parameter][key] = value


def _shape_of_start(start: torch.Tensor, parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape) if start.dim() else ()


def _dtype(start: torch.Tensor, is_count: bool) -> torch.dtype:
    """That of the state. In 16 bits, a count would not go beyond 256, or 2,048."""
    widens = is_count and start.is_floating_point()
    return torch.promote_types(start.dtype, torch.float32) if widens else start.dtype


def dtypes_of_start(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Types of the state that a fresh optimizer makes; nothing if it does not run on the host."""
    try:
        states = [_tried(optimizer, shape, dtype, None)[1] for shape in ((3,), (3, 2))]
    except Exception:  # an optimizer may raise anything on what it was not written for
        return {}
    return {
        key: value.dtype
        for state in states  # Adafactor has other state for a matrix than for a vector
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def starts_from_zeros(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor] | None:
    """State that a fresh optimizer makes of a vector, if it might have started from zeros.

    None as well if a matrix has other state than a vector (Adafactor). Some optimizers keep state
    of a type of its own for a parameter's dtype.
    """
    vector, matrix = (_start_of(optimizer, shape, dtype) for shape in ((3,), (3, 2)))
    if vector is None or matrix is None or vector.keys() != matrix.keys():
        return None
    return vector


def makes_such_state(
    optimizer: torch.optim.Optimizer,
    new: Sequence[Sequence[torch.Tensor]],
    starts: Mapping[torch.dtype, Mapping[str, torch.Tensor] | None],
) -> bool:
    """Whether parameters get state of the form that was found of small ones.

    Some optimizers factor the moments of matrices from a size on. A step on tensors without values
    tells, or on zeros, for one that needs values or has tensors of its own.

    Args:
        optimizer: the optimizer, with its groups.
        new: for each group, the parameters that have no state.
        starts: by dtype, what `starts_from_zeros` found.
    """
    for device in ("meta", "cpu"):
        try:
            made = _made_of(optimizer, new, torch.device(device))
        except Exception:  # an optimizer may raise anything on what it was not written for
            continue
        return all(
            {key: getattr(value, "shape", None) for key, value in state.items()}
            == {k: _shape_of_start(v, p) for k, v in (starts[p.dtype] or {}).items()}
            for p, state in made
        )
    return False


def _made_of(
    optimizer: torch.optim.Optimizer,
    new: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Stand-ins for parameters of each shape, and the state that a copy makes of them."""
    groups: list[dict[str, Any]] = []
    for group, parameters in zip(optimizer.param_groups, new, strict=True):
        kinds = {(p.shape, p.dtype): p for p in parameters}.values()
        zeros = [torch.zeros(p.shape, dtype=p.dtype, device=device) for p in kinds]
        stand_ins = [torch.nn.Parameter(value) for value in zeros]
        for stand_in in stand_ins:
            stand_in.grad = torch.zeros_like(stand_in)
        settings = {k: False if k in ("foreach", "fused") else v for k, v in group.items()}
        groups.append({**settings, "params": stand_ins})
    with random_kept():
        clone = clone_optimizer(optimizer, groups, {})
        type(optimizer).step(clone)
    return [(p, clone.state.get(p, {})) for group in groups for p in group["params"]]


def _start_of(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor] | None:
    """Steps a copy of the optimizer on a few numbers, once from nothing and once from zeros."""
    try:
        plain, state = _tried(optimizer, shape, dtype, None)
        is_like = [isinstance(v, torch.Tensor) and v.shape in ((), shape) for v in state.values()]
        if not all(is_like):
            return None
        zeroed, zeroed_state = _tried(optimizer, shape, dtype, state)
    except Exception:  # an optimizer that does not run on the host, or needs more than gradients
        return None
    is_same = all(torch.equal(a, b) for a, b in zip(plain, zeroed, strict=True)) and all(
        torch.equal(state[key], zeroed_state[key]) for key in state
    )
    return state if is_same else None


def idles_without_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step leaves alone what has no gradient, as those of `torch.optim` do.

    One that reads `p.grad` without a look at it fails there, and one that decays weights before it
    looks would decay them twice. What cannot be tried on the host passes.
    """
    shape, dtype = (3, 2), torch.float32
    try:
        _tried(optimizer, shape, dtype, None)
    except Exception:  # an optimizer may raise anything on what it was not written for
        return True
    try:
        values, _ = _tried(optimizer, shape, dtype, None, has_gradients=False)
    except Exception:  # the same
        return False
    before = torch.tensor(_VALUES, dtype=dtype).view(shape)
    return all(torch.equal(value, before) for value in values)


def _tried(
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    zeros: Mapping[str, torch.Tensor] | None,
    has_gradients: bool = True,
    factor: float = 1.0,
    num_steps: int = 2,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters and state after steps of a copy, which starts from zeros like those given.

    Gradients are multiplied by a factor. Without gradients a step does what it does with its own
    settings: forms for lists (`foreach`) may not take empty ones.
    """

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values[: math.prod(shape)], dtype=dtype).view(shape)

    groups = [
        {k: False if k in ("foreach", "fused") and has_gradients else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    parameters = [torch.nn.Parameter(numbers(*_VALUES)) for _ in groups]
    state: dict[torch.Tensor, dict[str, Any]] = {}
    if zeros is not None:
        state = {p: {k: torch.zeros_like(v) for k, v in zeros.items()} for p in parameters}
    with random_kept():
        clone = clone_optimizer(
            optimizer,
            [{**g, "params": [p]} for g, p in zip(groups, parameters, strict=True)],
            state,
        )
        for scale in (1.0, -0.4)[:num_steps]:
            for parameter in parameters:
                gradient = numbers(0.5, 0.25, -2.0, 1.5, -0.75, 0.125) * scale
                parameter.grad = gradient * factor if has_gradients else None
            type(optimizer).step(clone)
    return [p.detach() for p in parameters], clone.state[parameters[0]]
