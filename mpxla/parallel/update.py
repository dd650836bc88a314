"""The optimizer's update as compiled programs, for any optimizer of `torch.optim`'s shape.

Traced lazily in every step, an update of 100 parameters costs the host more than 100 ms. Here the
inner optimizer's own `step` is traced once and called by handle afterwards:

    phase 1, hooked:   a pre-step hook takes over, so that whoever calls the inner `step` (LR
                       schedulers wrap it, users hook it) sees the usual order of events.
    phase 2, started:  missing state is created as zeros, if a small trial on the host shows that
                       the optimizer would start from zeros.
    phase 3, traced:   a copy of the optimizer runs on stand-ins for parameters, gradients and
                       state. The learning rate is an argument; other settings are part of the key.
    phase 4, run:      the program's results become the parameters and the state; gradients are
                       hidden from the inner `step`, which then has nothing left to do.

What cannot be traced (an optimizer that reads values on the host, counts in Python, or draws random
numbers) runs as before: lazily, traced in every step.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpxla.errors import LoweringError
from mpxla.log import get_logger
from mpxla.stage.compile import Executable, compile_graph
from mpxla.stage.device import has_doubles, make_ready, to_device
from mpxla.stage.spec import TensorSpec

__all__ = ["CompiledUpdate"]

# Settings that change in every step (cyclic momentum) would compile a program in every step.
_MAX_PROGRAMS = 8
# Counts and rates are numbers in Python, of 64 bits: `1 - beta2 ** step` in 32 bits is off by 6e-5
# in the first step. Neuron has no such numbers.
_WIDE = torch.float64
_NEXT_TO_ZERO = 1e-30
_Groups = Sequence[Mapping[str, Any]]
_State = Mapping[torch.Tensor, dict[str, Any]]


class CompiledUpdate:
    """Runs the `step` of an optimizer whose parameters are on an XLA device.

    Args:
        optimizer: the optimizer; it gets hooks, and keeps its groups and its state.

    Attributes:
        num_programs: programs compiled so far.
        reason: why updates are not compiled, or None.
        was_compiled: whether the last update was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._programs: dict[Any, Executable] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rates: dict[float, torch.Tensor] = {}
        self._starts_from_zeros: dict[str, _Start] | None = None
        self.reason: str | None = None
        self.was_compiled = False
        self._pre_hook = optimizer.register_step_pre_hook(self._before)
        self._post_hook = optimizer.register_step_post_hook(self._after)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def step(self) -> None:
        """Runs the optimizer's `step`, compiled if that is possible.

        Hooks of the user see gradients, whether they were registered before or after this object.
        """
        self._optimizer._optimizer_step_pre_hooks.move_to_end(self._pre_hook.id)
        self._optimizer._optimizer_step_post_hooks.move_to_end(self._post_hook.id, last=False)
        self._optimizer.step()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.was_compiled = False
        if self.reason is not None or len(args) > 1 or kwargs.get("closure") is not None:
            return
        trained = [[p for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
        if not any(trained) or any(_is_elsewhere(p) for group in trained for p in group):
            return
        if not self._start_state(trained):
            return
        slots = _Slots(optimizer, trained)
        make_ready(slots.tensors)
        program = self._program(slots)
        if program is None:
            return
        results = program([*slots.tensors, *self._upload_rates(slots)])
        slots.store(results)
        self.was_compiled = True
        self._hidden = [(p, p.grad) for group in trained for p in group]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _program(self, slots: "_Slots") -> Executable | None:
        program = self._programs.get(slots.key)
        if program is not None:
            return program
        if len(self._programs) == _MAX_PROGRAMS:
            self._give_up("its settings change from step to step")
            return None
        try:
            program = self._compile(slots)
        except LoweringError as error:
            is_read = "_local_scalar_dense" in str(error)
            self._give_up("it reads values on the host" if is_read else str(error))
            return None
        except _NotTraceableError as error:
            self._give_up(str(error))
            return None
        except Exception as error:  # an optimizer may raise anything on what it was not written for
            self._give_up(f"{type(error).__name__} while tracing: {error}")
            return None
        if program.is_random:
            self._give_up("it draws random numbers")
            return None
        self._programs[slots.key] = program
        return program

    def _compile(self, slots: "_Slots") -> Executable:
        rate = TensorSpec((), _wide(slots.device))
        inputs = [*(TensorSpec.of(t) for t in slots.tensors), *(rate for _ in slots.rates)]
        try:
            tracer = _Tracer(slots, self._optimizer, is_capturable=True)
            return compile_graph("optimizer update", tracer, inputs, slots.device)
        except AssertionError:  # torch's list of devices for this optimizer has no XLA
            tracer = _Tracer(slots, self._optimizer, is_capturable=False)
            return compile_graph("optimizer update", tracer, inputs, slots.device)

    def _give_up(self, reason: str) -> None:
        """From now on the inner optimizer runs by itself; shared counters become its own again."""
        self.reason = reason
        self._programs.clear()
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    state[key] = value.clone()
        get_logger().info(
            "the update of %s is not compiled but traced in every step: %s",
            type(self._optimizer).__name__,
            reason,
        )

    def _upload_rates(self, slots: "_Slots") -> list[torch.Tensor]:
        """The learning rates on the device; numbers that the last step had are there already."""
        dtype, kept = _wide(slots.device), self._rates
        self._rates = {}
        uploaded = []
        for rate in slots.rates:
            value = None if isinstance(rate, torch.Tensor) else kept.get(rate)
            if value is None:
                (value,) = to_device([torch.as_tensor(rate).detach().to(dtype)], slots.device)
            if not isinstance(rate, torch.Tensor):
                self._rates[rate] = value
            uploaded.append(value)
        return uploaded

    def _start_state(self, trained: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Creates missing state; whether all parameters have theirs now."""
        states = self._optimizer.state
        new = [p for group in trained for p in group if not states.get(p)]
        if not new:
            _share_counters(states, new=())
            return True
        if self._starts_from_zeros is None:
            self._starts_from_zeros = _try_zeros(self._optimizer)
        if self._starts_from_zeros is None:
            return False  # the inner optimizer makes the state in a step of its own
        if not self._starts_from_zeros:
            return True
        for parameter in new:
            like = {
                key: torch.zeros(start.shape_for(parameter), dtype=start.dtype_for(parameter))
                for key, start in self._starts_from_zeros.items()
            }
            uploaded = to_device(list(like.values()), parameter.device)
            states[parameter] = dict(zip(like, uploaded, strict=True))
        _share_counters(states, new)
        return True


def _wide(device: torch.device) -> torch.dtype:
    return _WIDE if has_doubles(device) else torch.float32


def _is_elsewhere(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    assert gradient is not None
    return parameter.device.type != "xla" or gradient.device != parameter.device


def _share_counters(states: _State, new: Sequence[torch.Tensor]) -> None:
    """Gives parameters with the same count of steps one tensor for it, on their device.

    Counters on the host are those of a loaded state; counters of `new` parameters are all zero.
    """
    shared: dict[tuple[str, float], torch.Tensor] = {}
    fresh = set(map(id, new))
    for parameter, state in states.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 0:
                continue
            if id(parameter) in fresh:
                state[key] = shared.setdefault((key, 0.0), value)
            elif value.device.type == "cpu" and parameter.device.type == "xla":
                number = (key, value.item())
                if number not in shared:
                    (shared[number],) = to_device([value], parameter.device)
                state[key] = shared[number]


class _Start:
    """Shape and dtype of one entry of the state, relative to its parameter."""

    def __init__(self, value: torch.Tensor, parameter: torch.Tensor):
        self._is_scalar = value.dim() == 0
        self._dtype = None if value.dtype == parameter.dtype else value.dtype

    def shape_for(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return () if self._is_scalar else tuple(parameter.shape)

    def dtype_for(self, parameter: torch.Tensor) -> torch.dtype:
        if self._is_scalar:
            return self._dtype or torch.float32
        return self._dtype or parameter.dtype


def _try_zeros(optimizer: torch.optim.Optimizer) -> dict[str, _Start] | None:
    """What state a fresh optimizer makes, if it might as well have started from zeros.

    Steps a copy of the optimizer on three numbers per group, once from nothing and once from zeros.
    """

    def run(zeros: Mapping[str, torch.Tensor] | None) -> tuple[list[Any], dict[str, Any]]:
        parameters = [torch.nn.Parameter(torch.tensor([0.3, -0.7, 1.1])) for _ in groups]
        state = {p: {k: torch.zeros_like(v) for k, v in (zeros or {}).items()} for p in parameters}
        clone = _clone(
            optimizer,
            [{**g, "params": [p]} for g, p in zip(groups, parameters, strict=True)],
            state if zeros is not None else {},
        )
        for scale in (1.0, -0.4):
            for parameter in parameters:
                parameter.grad = torch.tensor([0.5, 0.25, -2.0]) * scale
            type(optimizer).step(clone)
        return [p.detach() for p in parameters], clone.state[parameters[0]]

    groups = [
        {k: False if k in ("foreach", "fused") else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    try:
        plain, state = run(None)
        if not all(isinstance(v, torch.Tensor) and v.shape in ((), (3,)) for v in state.values()):
            return None
        zeroed, zeroed_state = run(state)
    except Exception:  # an optimizer that does not run on the host, or needs more than gradients
        return None
    is_same = all(torch.equal(a, b) for a, b in zip(plain, zeroed, strict=True)) and all(
        torch.equal(state[key], zeroed_state[key]) for key in state
    )
    return {k: _Start(v, plain[0]) for k, v in state.items()} if is_same else None


def _clone(optimizer: Any, groups: _Groups, state: _State) -> Any:
    """An optimizer of the same class and attributes on other tensors, without hooks."""
    clone = object.__new__(type(optimizer))
    hooks = {k: OrderedDict() for k in vars(optimizer) if k.startswith("_optimizer_")}
    # `step` is there where an LR scheduler has wrapped it.
    attributes = {k: v for k, v in vars(optimizer).items() if k != "step"}
    vars(clone).update({**attributes, **hooks})
    clone.param_groups = list(groups)
    clone.state = defaultdict(dict, state)
    return clone


class _NotTraceableError(Exception):
    """An optimizer that keeps part of its state in Python."""


class _Slots:
    """The tensors of one update in the order of the program's arguments, and the way back.

    Attributes:
        tensors: parameters, their gradients, their state; every tensor once.
        trained: the parameters with a gradient, by group.
        rates: different learning rates of the groups, as the groups hold them.
        device: where the parameters are.
        key: equal for updates that the same program can do.
    """

    def __init__(self, optimizer: Any, trained: Sequence[Sequence[torch.nn.Parameter]]):
        self._optimizer = optimizer
        self.trained = trained
        self.tensors: list[torch.Tensor] = []
        self.rates: list[Any] = []
        index_of: dict[int, int] = {}

        def slot(tensor: torch.Tensor) -> int:
            if id(tensor) not in index_of:
                index_of[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            return index_of[id(tensor)]

        # (parameter, gradient, state) of every parameter, by group
        self.places: list[list[tuple[int, int, dict[str, int]]]] = []
        self.rate_of: list[int | None] = []
        rate_index: dict[Any, int] = {}
        for group, parameters in zip(optimizer.param_groups, trained, strict=True):
            places = []
            for p in parameters:
                state = {
                    key: slot(value)
                    for key, value in optimizer.state.get(p, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                places.append((slot(p), slot(p.grad), state))
            self.places.append(places)
            rate = group.get("lr")
            if not isinstance(rate, (float, int, torch.Tensor)):
                self.rate_of.append(None)
                continue
            number = rate_index.setdefault(
                id(rate) if isinstance(rate, torch.Tensor) else float(rate), len(self.rates)
            )
            if number == len(self.rates):
                self.rates.append(rate if isinstance(rate, torch.Tensor) else float(rate))
            self.rate_of.append(number)
        self.device = next(p for group in trained for p in group).device
        self.key = (
            tuple(_settings(group) for group in optimizer.param_groups),
            tuple(tuple(id(p) for p in group) for group in trained),
            tuple((p, g, *state.values()) for places in self.places for p, g, state in places),
            tuple(self.rate_of),
        )

    def changed(self) -> Iterator[int]:
        """Slots that an update changes, in the order of the program's results."""
        seen: set[int] = set()
        for places in self.places:
            for parameter, _, state in places:
                for place in (parameter, *state.values()):
                    if place not in seen:
                        seen.add(place)
                        yield place

    def store(self, results: Sequence[torch.Tensor]) -> None:
        """Makes a program's results the parameters and the state."""
        new = dict(zip(self.changed(), results, strict=True))
        for places, parameters in zip(self.places, self.trained, strict=True):
            for (place, _, state_places), parameter in zip(places, parameters, strict=True):
                parameter.data = new[place]
                state = self._optimizer.state[parameter]
                for key, state_place in state_places.items():
                    state[key] = new[state_place]


def _away_from_zero(rate: torch.Tensor) -> torch.Tensor:
    """A rate of 0 (the first of a warm-up) as one that moves nothing that is larger than 1e-30.

    Adam with `capturable` divides by the rate: 0 / 0 where a gradient was never other than 0, as in
    rows of an embedding (torch 2.9).
    """
    return torch.where(rate == 0, _NEXT_TO_ZERO, rate)


def _settings(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a program holds as constants: all settings but the learning rate."""
    skipped = ("params", "lr", "initial_lr")
    return tuple((k, repr(v)) for k, v in group.items() if k not in skipped)


class _Tracer(torch.nn.Module):
    """(parameters, gradients, state, learning rates) -> (new parameters, new state).

    Args:
        slots: what the arguments are.
        optimizer: the optimizer.
        is_capturable: whether to have it compute with its count of steps on the device.
    """

    def __init__(self, slots: _Slots, optimizer: Any, is_capturable: bool):
        super().__init__()
        self._is_capturable = is_capturable
        self._slots = slots
        self._optimizer = optimizer

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        slots, optimizer = self._slots, self._optimizer
        rates = arguments[len(slots.tensors) :]
        groups: list[dict[str, Any]] = []
        state: dict[torch.Tensor, dict[str, Any]] = {}
        of_place: dict[int, tuple[torch.Tensor, str | None]] = {}
        for group, places, originals, rate in zip(
            optimizer.param_groups, slots.places, slots.trained, slots.rate_of, strict=True
        ):
            stand_ins = []
            for (place, grad_place, state_places), original in zip(places, originals, strict=True):
                # Updates change their operands in place; arguments have to stay.
                stand_in = torch.nn.Parameter(arguments[place].clone())
                stand_in.grad = arguments[grad_place].clone()
                state[stand_in] = copy.copy(optimizer.state.get(original, {}))
                of_place[place] = (stand_in, None)
                for key, state_place in state_places.items():
                    state[stand_in][key] = _widened(arguments[state_place]).clone()
                    of_place.setdefault(state_place, (stand_in, key))
                stand_ins.append(stand_in)
            settings = {**group, "params": stand_ins, "foreach": False, "fused": False}
            if rate is not None:
                settings["lr"] = _away_from_zero(rates[rate])
            if "capturable" in group:
                settings["capturable"] = self._is_capturable
            groups.append({k: v for k, v in settings.items() if k in group})
        clone = _clone(optimizer, groups, state)
        before = _python_values(clone)
        with _TensorScalars():
            type(optimizer).step(clone)
        if _python_values(clone) != before:
            raise _NotTraceableError("it keeps counts or values in Python")
        results = []
        for place in slots.changed():
            stand_in, key = of_place[place]
            value = stand_in.detach() if key is None else clone.state[stand_in][key]
            results.append(value.to(arguments[place].dtype))
        return results


def _widened(value: torch.Tensor) -> torch.Tensor:
    is_count = value.dim() == 0 and value.is_floating_point()
    return value.to(_wide(value.device)) if is_count else value


def _python_values(optimizer: Any) -> Any:
    """Everything an update could change that is not a tensor."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    plain = {k: v for k, v in own.items() if isinstance(v, (int, float, str, tuple))}
    groups = [
        {k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups
    ]
    state = [
        {k: None if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
        for entries in optimizer.state.values()
    ]
    return plain, copy.deepcopy(groups), copy.deepcopy(state)


class _TensorScalars(TorchFunctionMode):
    """Lets tensors of one element stand where an operator takes a number (`alpha`, `value`).

    torch reads such a tensor on the host, which would make a constant of the learning rate.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if isinstance(kwargs.get("alpha"), torch.Tensor) and name in ("add", "add_", "sub", "sub_"):
            target, other, *rest = args
            return func(target, other * kwargs.pop("alpha"), *rest, **kwargs)
        products = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")
        if isinstance(kwargs.get("value"), torch.Tensor) and name in products:
            target, first, second, *rest = args
            return func(target, first * kwargs.pop("value"), second, *rest, **kwargs)
        return func(*args, **kwargs)
