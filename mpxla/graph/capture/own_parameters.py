"""The parameters that users see while a step function is captured are their own.

Fake tensors stand for them, as `torch.export` wants it, and every function of torch is given these
in their place. Python's `is` and `in`, `id()`, keys of dictionaries and `type()` are not functions
of torch: `if p in self.frozen` would be false in silence if modules showed the stand-ins.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C import DisableTorchFunction
from torch._export import wrappers

from mpxla.errors import CaptureError
from mpxla.graph.capture.aliases import SecondNames
from mpxla.graph.exchanged import exchanged
from mpxla.graph.memory import Memory, memory
from mpxla.graph.stepgraph import InputKind, StepGraph

__all__ = ["Former", "OwnParameters"]

Former = Mapping[Memory, torch.Tensor]
"""Parameters and buffers by their memory from before they moved, where something still has it."""


class OwnParameters:
    """Parameters of a model, and what stands for each.

    Args:
        model: has the stand-ins, now.
        real: the model's own parameters, by name.
        buffers: its own buffers, by name.
        former: where both were.
        seconds: what stands for other tensors that are its buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        real: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        former: Former,
        seconds: SecondNames,
    ):
        named = [*model.named_parameters()]
        self._stand_ins = {id(real[name]): stand_in for name, stand_in in named}
        self._own = {id(stand_in): real[name] for name, stand_in in named}
        self._model, self.seconds = model, seconds
        self._memory: dict[Memory | None, torch.Tensor] = {**former}
        # Parameters last: a buffer that is parameter.data is none of its own.
        self._memory |= {memory(own): own for own in (*buffers.values(), *real.values())}
        self._memory.pop(None, None)
        self.detached: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach

    def stand_in(self, value: Any) -> Any:
        """What stands for a parameter of the model, or for a tensor that is one of its buffers.

        Others are given as they are.
        """
        found = self._stand_ins.get(id(value), value)
        return found if type(found) is not torch.Tensor else self._as_buffer(found)

    def stand_ins(self, tree: Any) -> Any:
        """Arguments with these in the place of parameters, and of views of all of one."""
        return pytree.tree_map(self._seen, tree)

    def _seen(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return self.stand_in(value)
        with DisableTorchFunction():
            stand_in = self._stand_ins.get(id(self._own_of(value)))
        return self._as_buffer(value) if stand_in is None else self.detached(stand_in)

    def _own_of(self, value: torch.Tensor) -> torch.Tensor | None:
        return self._memory.get(memory(value))

    def _as_buffer(self, value: torch.Tensor) -> torch.Tensor:
        with DisableTorchFunction():
            return self.seconds.seen(value, self._own_of(value))

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes in which tensors of the script a step has written to in place.

        Raises:
            AgainError: some are buffers, which stand for them from the next capture on.
        """
        self.seconds.tie(self.seconds.named(map(self._own_of, tensors)))

    def check(self, step: StepGraph) -> None:
        """Checks, at the end, that a captured step uses no parameter or buffer as a constant.

        Raises:
            CaptureError: it does; see `SecondNames.check`, too.
        """
        known, self._memory = self._memory, {}
        self.seconds.check(step)
        used = [role for node, role in step.roles.items() if node.users]
        constants = [role for role in used if role.kind is InputKind.CONSTANT]
        for role in constants:
            parameter = known.get(memory(step.constants[role.name]))
            if isinstance(parameter, nn.Parameter):
                raise CaptureError(
                    f"The step function gives a parameter of shape {list(parameter.shape)} to code "
                    f"that a capture does not see (a function of C++, or under "
                    f"torch._C.DisableTorchFunction), where it would stay as it is now. Give it "
                    f"parameter.view_as(parameter)."
                )

    def given(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that gets these in the place of parameters."""
        return lambda *args: function(*self.stand_ins(args))

    @contextlib.contextmanager
    def shown(self) -> Generator[None]:
        """Lets modules have the parameters themselves for a while.

        Those that `lend_parameters` keep what stands for them: the code that they lend them to is
        no Python, and calls no function of torch that could be noticed.
        """
        modules = [m for m in self._model.modules() if not hasattr(m, "lend_parameters")]
        tables: list[dict[str, Any]] = [m._parameters for m in modules]  # pyright: ignore[reportPrivateUsage]
        # Without the gradients and the errors of those that are divided or elsewhere.
        kinds = [(parameter, type(parameter)) for parameter in self._own.values()]
        kinds = [(p, kind) for p, kind in kinds if kind.__module__.startswith("mpxla.")]
        made: Any = nn.Parameter.__new__
        # Puts functions such as that of flex_attention's indices into the graph as they are called.
        emit: Any = vars(wrappers)["_emit_flat_apply_call"]

        def make(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
            return made(cls, self.stand_in(data), *args, **kwargs)

        def emit_of_stand_ins(*, graphable_args: Any, **kwargs: Any) -> None:
            emit(graphable_args=self.stand_ins(graphable_args), **kwargs)

        with (
            exchanged(nn.Parameter, __new__=make),
            exchanged(wrappers, _emit_flat_apply_call=emit_of_stand_ins),
        ):
            for parameter, _ in kinds:
                parameter.__class__ = nn.Parameter
            for table in tables:
                table.update({k: self._own.get(id(v), v) for k, v in table.items()})
            try:
                yield
            finally:
                for parameter, kind in kinds:
                    parameter.__class__ = kind
                for table in tables:
                    table.update({k: self.stand_in(v) for k, v in table.items()})

    def release(self) -> None:
        """Lets go of tensors."""
        self._stand_ins.clear()
        self._own.clear()
        self.detached = torch.Tensor.detach
