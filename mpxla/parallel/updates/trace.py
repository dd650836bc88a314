"""Tracing of an optimizer's `step` as a function of tensors.

A copy of the optimizer runs on stand-ins for its parameters, gradients and state. Counts of steps
and rates are tensors meanwhile, because a number would be a constant of the program.
"""

import contextlib
import copy
import functools
import inspect
import operator
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpxla.graph.exchanged import exchanged
from mpxla.parallel.updates.copy import renewed
from mpxla.parallel.updates.python import (
    NotTraceableError,
    copied_attributes,
    describe,
    state_of_no_parameter,
)
from mpxla.parallel.updates.slots import Arrangement, constants_of
from mpxla.parallel.updates.stochastic_rounding import (
    Noise,
    Origin,
    is_narrow,
    origin_of_state,
    rounded,
)
from mpxla.random_states import OF_PYTHON, random_kept, states_of

__all__ = ["UpdateFunction", "clone_optimizer", "python_state", "without_tensors"]

_NEXT_TO_ZERO = 1e-30
_Groups = Sequence[Mapping[str, Any]]
_State = Mapping[torch.Tensor, dict[str, Any]]


def clone_optimizer(
    optimizer: Any, groups: _Groups, state: _State, own: Mapping[str, Any] | None = None
) -> Any:
    """An optimizer of the same class on other tensors, without hooks, which may be tried.

    `own` are attributes of its class; None for copies of those of the optimizer.
    """
    clone = object.__new__(type(optimizer))
    hooks = {k: OrderedDict() for k in vars(optimizer) if k.startswith("_optimizer_")}
    # `step` is there where an LR scheduler has wrapped it.
    shared = {k: v for k, v in vars(optimizer).items() if k not in ("step", "state")}
    own = copied_attributes(optimizer) if own is None else own
    vars(clone).update({**shared, **own, **hooks})
    copied = [
        {k: v if k in ("params", "lr") else copy.deepcopy(v) for k, v in group.items()}
        for group in groups
    ]
    rest = {k: copy.deepcopy(v) for k, v in state_of_no_parameter(optimizer).items()}
    within = [
        part
        for name, part in own.items()
        if isinstance(part, torch.optim.Optimizer) and part is not getattr(optimizer, name)
    ]
    for inner in within:  # an LR scheduler's `step` is bound to the one that was copied
        vars(inner).pop("step", None)
    for name, value in (("param_groups", copied), ("state", defaultdict(dict, {**rest, **state}))):
        is_shown = isinstance(getattr(type(optimizer), name, None), property)
        for holder in within if is_shown else [clone]:  # a wrapper shows those of the one within
            setattr(holder, name, value)
    return clone


class UpdateFunction:
    """(parameters, gradients, state, learning rates) -> (new parameters, new state).

    Masters take what was written to their compute copies first; these are results too. With
    stochastic rounding, narrow arguments are computed with in float32, and the key of the update is
    one more argument, the last one.

    Args:
        arrangement: what the arguments are.
        optimizer: the optimizer.
        is_capturable: whether to have it compute with its count of steps on the device.
        wide: dtype of counts and rates, see `wide_dtype`.
        counts: the entries of states that are counts.
        origins: id of a parameter -> where it is in the model; None to round to the nearest.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        optimizer: Any,
        is_capturable: bool,
        wide: torch.dtype,
        counts: Collection[str],
        origins: Mapping[int, Origin] | None = None,
    ):
        self._origins = origins
        self._is_capturable = is_capturable
        self._wide = wide
        self._counts = counts
        self._arrangement = arrangement
        self._optimizer = optimizer

    def __call__(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """New parameters and state, in the order of `Arrangement.changed`."""
        arranged, optimizer = self._arrangement, self._optimizer
        rates = arguments[arranged.num_slots :][: arranged.num_rates]
        origins = self._origins
        noise = None if origins is None else Noise(arguments[-1])
        groups: list[dict[str, Any]] = []
        state: dict[torch.Tensor, dict[str, Any]] = {}
        of_place: dict[int, tuple[torch.Tensor, str | None]] = {}
        original_of: dict[torch.Tensor, torch.Tensor] = {}
        for group, places, originals, rate in zip(
            optimizer.param_groups,
            arranged.places,
            arranged.trained,
            arranged.rate_of,
            strict=True,
        ):
            stand_ins = []
            for held, original in zip(places, originals, strict=True):
                # Updates change their operands in place; arguments have to stay.
                value = self._copied(arguments[held.parameter])
                if held.source is not None:
                    value = renewed(arguments[held.source], value)
                stand_in = torch.nn.Parameter(value)
                stand_in.grad = self._copied(arguments[held.gradient])
                original_of[stand_in] = original
                state[stand_in] = {
                    key: None if key in held.state else copy.deepcopy(value)
                    for key, value in optimizer.state.get(original, {}).items()
                }
                of_place[held.parameter] = (stand_in, None)
                if held.source is not None:
                    of_place[held.source] = (stand_in, None)  # it is rounded below
                for key, state_place in held.state.items():
                    argument = arguments[state_place]
                    if key in self._counts and argument.is_floating_point():
                        argument = argument.to(self._wide)
                    state[stand_in][key] = self._copied(argument)
                    of_place.setdefault(state_place, (stand_in, key))
                stand_ins.append(stand_in)
            settings = {**group, "params": stand_ins, "foreach": False, "fused": False}
            if rate is not None:
                settings["lr"] = _away_from_zero(rates[rate])
            if "capturable" in group:
                settings["capturable"] = self._is_capturable
            groups.append({k: v for k, v in settings.items() if k in group})
        clone = clone_optimizer(optimizer, groups, state)
        self._run(clone)
        results = []
        for place in arranged.changed:
            stand_in, key = of_place[place]
            value = stand_in.detach() if key is None else clone.state[stand_in][key]
            if noise is not None and origins is not None and is_narrow(arguments[place]):
                origin = origins[id(original_of[stand_in])]
                if key is not None:
                    origin = origin_of_state(origin, key, value, stand_in)
                results.append(rounded(value, noise.of(origin, value.shape)))
            else:
                results.append(value.to(arguments[place].dtype))
        return results

    def _copied(self, argument: torch.Tensor) -> torch.Tensor:
        is_rounded = self._origins is not None and is_narrow(argument)
        return argument.float() if is_rounded else argument.clone()

    def _run(self, clone: Any) -> None:
        """One step of the copy, which has to change tensors only."""
        before, drawn = _python_values(clone), states_of(OF_PYTHON)
        numbers = _TensorScalars(self._wide)
        with random_kept(OF_PYTHON), numbers, _capturable(type(clone)), _choosing(type(clone)):
            type(clone).step(clone)
            is_random = states_of(OF_PYTHON) != drawn
        if is_random:
            raise NotTraceableError("it draws random numbers")
        if _python_values(clone) != before:
            raise NotTraceableError("it keeps counts or values in Python")


@contextlib.contextmanager
def _capturable(kind: type) -> Generator[None]:
    """Lets an optimizer compute with tensors for counts on any device, the processor too.

    torch allows it where kernels are launched, because only there it would pay in eager mode. Its
    optimizers ask a function that each of their modules has imported.
    """
    name = "_get_capturable_supported_devices"
    modules = [sys.modules[part.__module__] for part in kind.__mro__ if part is not object]
    with contextlib.ExitStack() as stack:
        for module in (module for module in modules if hasattr(module, name)):
            allowed = getattr(module, name)

            def more(*args: Any, own: Any = allowed, **kwargs: Any) -> list[str]:
                return [*own(*args, **kwargs), "cpu"]

            stack.enter_context(exchanged(module, **{name: more}))
        yield


@contextlib.contextmanager
def _choosing(kind: type) -> Generator[None]:
    """Lets the modules of an optimizer choose with `max` and `min` among numbers that are tensors.

    Adafactor does so with norms; Python would read them.
    """
    steps = (vars(part)["step"] for part in kind.__mro__ if "step" in vars(part))
    modules = {id(found): found for found in (inspect.unwrap(step).__globals__ for step in steps)}
    chosen = {"max": (max, operator.gt), "min": (min, operator.lt)}
    places = [(names, name) for names in modules.values() for name in chosen]
    before = [(names, name, names.get(name)) for names, name in places]
    for names, name, own in before:
        function, is_better = chosen[name]
        names[name] = functools.partial(_chosen, function if own is None else own, is_better)
    try:
        yield
    finally:
        for names, name, own in before:
            names.pop(name) if own is None else names.update({name: own})


def _chosen(function: Any, is_better: Any, *values: Any, **settings: Any) -> Any:
    has_numbers = any(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)
    if len(values) != 2 or settings or not has_numbers:
        return function(*values, **settings)
    first, second = values  # a number stays one: a tensor would be one of the host
    return torch.where(is_better(second, first), second, first)


def _away_from_zero(rate: torch.Tensor) -> torch.Tensor:
    """A rate of 0 (the first of a warm-up) as one that moves nothing that is larger than 1e-30.

    Adam with `capturable` divides by the rate: 0 / 0 where a gradient was never other than 0, as in
    rows of an embedding (torch 2.9).
    """
    return torch.where(rate == 0, _NEXT_TO_ZERO, rate)


def _python_values(optimizer: Any) -> Any:
    """Everything an update could change that is not a tensor of its parameters' state."""
    state = [
        (None if torch.is_tensor(owner) else owner, python_state(entry))
        for owner, entry in optimizer.state.items()
    ]
    return constants_of(optimizer), state


def python_state(entry: Any) -> Any:
    """What the state of a parameter holds beside tensors, comparable."""
    return describe(without_tensors(entry) if isinstance(entry, Mapping) else entry, "state")


def without_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of a parameter, with None in place of tensors."""
    return {k: None if isinstance(v, torch.Tensor) else v for k, v in state.items()}


class _TensorScalars(TorchFunctionMode):
    """Lets tensors of one element stand where an operator takes a number (`alpha`, `value`).

    torch reads such a tensor on the host, which would make a constant of the learning rate. What
    optimizers read themselves by `item()` stays a tensor, of the dtype given; where Python needs
    its value (in a branch), tracing ends in an error all the same.
    """

    def __init__(self, wide: torch.dtype):
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.item and args[0].is_floating_point():
            return args[0].to(self._wide).clone()
        if name in ("lerp", "lerp_") and len(args) == 3 and isinstance(args[2], torch.Tensor):
            args = (*args[:2], args[2].to(args[0].dtype))
        if isinstance(kwargs.get("alpha"), torch.Tensor) and name in ("add", "add_", "sub", "sub_"):
            target, other, *rest = args
            return func(target, other * kwargs.pop("alpha"), *rest, **kwargs)
        products = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")
        if isinstance(kwargs.get("value"), torch.Tensor) and name in products:
            target, first, second, *rest = args
            return func(target, first * kwargs.pop("value"), second, *rest, **kwargs)
        return func(*args, **kwargs)
