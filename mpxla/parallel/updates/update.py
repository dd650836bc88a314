"""The optimizer's update as compiled programs, for any optimizer of `torch.optim`'s shape.

Traced lazily in every step, an update of 100 parameters costs the host more than 100 ms. Here the
inner optimizer's own `step` is traced once and called by handle afterwards:

    phase 1, hooked:   a pre-step hook takes over, so that whoever calls the inner `step` (LR
                       schedulers wrap it, users hook it) sees the usual order of events.
    phase 2, started:  missing state is created as zeros, if a small trial on the host shows that
                       the optimizer would start from zeros.
    phase 3, traced:   a copy of the optimizer runs on stand-ins for parameters, gradients and
                       state, once for parameters that are alike. The learning rate is an argument;
                       other settings are part of the key.
    phase 4, run:      the program's results become the parameters and the state; gradients are
                       hidden from the inner `step`, which then has nothing left to do.

What cannot be traced (an optimizer that reads values on the host, counts in Python, draws random
numbers, or keeps tensors outside of its state) runs as before: lazily, traced in every step.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from mpxla.device.backend import Backend, Buffer, Executable
from mpxla.errors import LoweringError, MpxlaError
from mpxla.kept import Kept
from mpxla.log import get_logger
from mpxla.parallel.programs import wide_dtype
from mpxla.parallel.updates.graph import UPDATE, recall_update
from mpxla.parallel.updates.parts import UpdateInParts, update_in_parts
from mpxla.parallel.updates.pieces import OptimizerPieces
from mpxla.parallel.updates.python import NotTraceableError
from mpxla.parallel.updates.rounding import UpdateRounding
from mpxla.parallel.updates.slots import Slots, constants_of
from mpxla.parallel.updates.state import (
    counts_of,
    idles_without_gradients,
    makes_such_state,
    share_counters,
    start_from_zeros,
    starts_from_zeros,
)
from mpxla.stage.making import graphs_made_quickly
from mpxla.stage.spec import TensorSpec

__all__ = ["CompiledUpdate"]

# Settings that change in every step (cyclic momentum) would compile a program in every step.
_MAX_PROGRAMS = 8


class CompiledUpdate:
    """Runs the `step` of an optimizer whose parameters are on the device.

    The optimizer gets hooks, and keeps its groups and its state. A compiled update renews and
    publishes the masters among the pieces as well; before others, they are renewed here. Without
    `rounding`, results are rounded to the nearest.

    Attributes:
        reason: why updates are not compiled, or None.
        was_compiled: whether the last update was.
        begins: is called before an update, if it is not None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        pieces: OptimizerPieces | None = None,
        rounding: UpdateRounding | None = None,
        kept: Kept | None = None,
    ):
        self._backend = backend
        self._kept = kept or Kept()
        self._rounding = rounding
        self._pieces = OptimizerPieces(optimizer, {}) if pieces is None else pieces
        self._optimizer = optimizer
        self._programs: dict[Any, Executable | UpdateInParts] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slots: Slots | None = None
        self._rates: dict[float, torch.Tensor] = {}
        self._starts: dict[torch.dtype, dict[str, torch.Tensor] | None] = {}
        self.reason: str | None = None
        self.was_compiled = False
        self.begins: Callable[[], None] | None = None
        self._pre_hook = optimizer.register_step_pre_hook(self._before)
        self._post_hook = optimizer.register_step_post_hook(self._after)

    @functools.cached_property
    def _counts(self) -> frozenset[str]:
        """See `counts_of`, which tries the optimizer: not before it is known that it may be."""
        return counts_of(self._optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the optimizer's `step`, compiled if that is possible and there is no closure.

        Hooks of the user see gradients, whether they were registered before or after this object.
        """
        optimizer: Any = self._optimizer  # torch calls its ordered hooks a plain dict
        optimizer._optimizer_step_pre_hooks.move_to_end(self._pre_hook.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._post_hook.id, last=False)
        try:
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        finally:
            if self._rounding is not None and not self.was_compiled:
                self._rounding.narrow()

    @contextlib.contextmanager
    def hooks_called(self, closure: Callable[[], Any], is_elsewhere: bool) -> Generator[None]:
        """Calls the user's hooks before a step that begins with a closure, and not again in it.

        Those for the end of a step are called too, if it is taken by another optimizer.
        """
        optimizer: Any = self._optimizer
        hooks, given = optimizer._optimizer_step_pre_hooks, (optimizer, closure)
        early = {key: hook for key, hook in hooks.items() if key != self._pre_hook.id}
        for key, hook in early.items():
            hook(optimizer, given, {})
            del hooks[key]
        try:
            yield
        finally:
            hooks.update(early)
        for key, hook in optimizer._optimizer_step_post_hooks.items() if is_elsewhere else ():
            if key != self._post_hook.id:
                hook(optimizer, given, {})

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.begins is not None:
            self.begins()
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        self.was_compiled = not has_closure and self._runs(optimizer)
        if not self.was_compiled:
            self._pieces.renew_masters()
            if self._rounding is not None:
                self._rounding.widen()
            if isinstance(optimizer, torch.optim.SparseAdam):
                self._make_sparse(optimizer)

    def _make_sparse(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer that refuses dense gradients their rows that are not zero.

        Programs have no sparse tensors. (A row that was looked up, but has no gradient, is left
        out: PyTorch would let its moments decay.)
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._hidden = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, gradient in self._hidden:
            if gradient.device.type not in ("cpu", "cuda"):
                raise MpxlaError(
                    "SparseAdam takes sparse gradients only, and torch_xla has no sparse tensors: "
                    'use Adam, or jax (key device: "pjrt").'
                )
            parameter.grad = gradient.to_sparse(1)

    def _runs(self, optimizer: Any) -> bool:
        """Runs the update, if it is one that can be compiled."""
        if self.reason is not None:
            return False
        try:
            constants = constants_of(optimizer)
        except NotTraceableError as error:
            self.give_up(str(error))
            return False
        trained = [[p for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
        slots, self._slots = self._slots, None
        if slots is None or not slots.renew(trained, constants):
            if not any(trained) or any(self._is_elsewhere(p) for group in trained for p in group):
                return False
            if not self._start_state(trained):
                return False
            source_of = self._pieces.source_of
            slots = Slots(optimizer, trained, constants, self._backend, source_of)
        program = self._program(slots)
        if program is None:
            return False
        arguments = [*self._backend.adopt(slots.tensors, slots.held), *self._upload_rates(slots)]
        if self._rounding is not None:
            arguments.append(self._rounding.key())
        takes_memory = self._backend.donates or isinstance(program, UpdateInParts)
        try:
            if takes_memory:
                slots.let_go(arguments)
            results = program(arguments)
        except BaseException:  # it did not start and has taken nothing, or has put in new values
            if takes_memory:
                slots.take_back([arguments[i] for i in slots.donated])
            raise
        slots.store(results)
        self._slots = slots
        self._hidden = [(p, p.grad) for group in trained for p in group]
        for parameter, _ in self._hidden:
            parameter.grad = None
        return True

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _program(self, slots: Slots) -> Executable | UpdateInParts | None:
        program = self._programs.get(slots.key)
        if program is not None:
            return program
        if len(self._programs) == _MAX_PROGRAMS:
            self.give_up("its settings change from step to step")
            return None
        try:
            with graphs_made_quickly():
                program = self._compile(slots)
        except LoweringError as error:
            is_read = "_local_scalar_dense" in str(error)
            self.give_up("it reads values on the host" if is_read else str(error))
            return None
        except Exception as error:  # an optimizer may raise anything on what it was not written for
            self.give_up(f"{type(error).__name__} while tracing: {error}")
            return None
        if program.is_random:
            self.give_up("it draws random numbers")
            return None
        if not idles_without_gradients(self._optimizer):  # phase 4 hides them
            self.give_up("it does not leave alone what has no gradient")
            return None
        self._programs[slots.key] = program
        return program

    def _compile(self, slots: Slots) -> Executable | UpdateInParts:
        rate = TensorSpec((), wide_dtype(self._backend))
        inputs = [*(TensorSpec.of(t) for t in slots.tensors), *(rate for _ in slots.rates)]
        origins = None
        if self._rounding is not None:
            inputs.append(TensorSpec((2,), torch.int32))
            origins = self._rounding.origins()
        arguments = slots.arrangement, self._optimizer, inputs, self._backend, self._kept
        try:
            graph = recall_update(*arguments, (True, rate.dtype, self._counts, origins))
        except AssertionError:  # torch's list of devices for this optimizer has no XLA
            graph = recall_update(*arguments, (False, rate.dtype, self._counts, origins))
        if self._backend.donates:
            return self._backend.compile(UPDATE, graph, inputs, slots.donated)
        parts = update_in_parts(UPDATE, graph, inputs, slots.arrangement.changed, self._backend)
        return parts or self._backend.compile(UPDATE, graph, inputs)

    def give_up(self, reason: str) -> None:
        """From now on the inner optimizer runs by itself; shared counters become its own again."""
        self.reason = reason
        self._programs.clear()
        for owner, state in self._optimizer.state.items():
            for key, value in state.items() if torch.is_tensor(owner) else ():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    state[key] = value.clone()
        get_logger().info(
            "the update of %s is not compiled but traced in every step: %s",
            type(self._optimizer).__name__,
            reason,
        )

    def _upload_rates(self, slots: Slots) -> list[Buffer]:
        """The learning rates on the device; numbers that the last step had are there already."""
        dtype, kept = wide_dtype(self._backend), self._rates
        self._rates = {}
        uploaded = []
        for rate in slots.rates:
            value = None if isinstance(rate, torch.Tensor) else kept.get(rate)
            if value is None:
                (value,) = self._backend.put([torch.as_tensor(rate, dtype=dtype).detach()])
            if not isinstance(rate, torch.Tensor):
                self._rates[rate] = value
            uploaded.append(value)
        return uploaded

    def _start_state(self, trained: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Creates missing state; whether all parameters have theirs now."""
        states = self._optimizer.state
        new = [p for group in trained for p in group if not states.get(p)]
        if not new:
            share_counters(states, (), self._backend, self._counts)
            return True
        for dtype in {parameter.dtype for parameter in new} - self._starts.keys():
            self._starts[dtype] = starts_from_zeros(self._optimizer, dtype)
        if any(self._starts[parameter.dtype] is None for parameter in new):
            return False  # the inner optimizer makes the state in a step of its own
        fresh = [[p for p in group if not states.get(p)] for group in trained]
        if not makes_such_state(self._optimizer, fresh, self._starts):
            return False
        starts = {p: self._starts[p.dtype] or {} for p in new}
        start_from_zeros(states, starts, self._backend, self._counts)
        share_counters(states, new, self._backend, self._counts)
        return True

    def _is_elsewhere(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        assert gradient is not None
        is_there = self._backend.is_on_device(parameter)
        return not is_there or gradient.device != parameter.device
