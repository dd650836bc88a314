"""What torch calls mean while a step function is captured.

Devices read as the host, plain autograd is refused, and what stands for values decides where they
have to. This module must not know what the captured graph is used for.
"""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.capture.autograd import DifferentiatesInsideError
from mpxla.graph.capture.collectives import Replicas
from mpxla.graph.capture.constants import Constants
from mpxla.graph.capture.control_flow import CONTROL_FLOW
from mpxla.graph.capture.flags import Flags
from mpxla.graph.capture.functions import (
    CAPTURED_FUNCTIONS,
    without_generator,
)
from mpxla.graph.capture.gradient_hooks import hook_tensor
from mpxla.graph.capture.hooks import refuse_gradients
from mpxla.graph.capture.own_parameters import OwnParameters
from mpxla.graph.capture.pieces import Joins, Pieces
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.recurrent import Recurrences
from mpxla.graph.capture.retained import BACKWARD, Retained
from mpxla.graph.capture.selects import Selected, as_torch_reads
from mpxla.graph.capture.sparse import has_sparse, run_sparse
from mpxla.graph.capture.whole_parameters import WholeParameters
from mpxla.graph.capture.writes import HiddenWrites
from mpxla.graph.gradients import Gradients
from mpxla.graph.memory import memory
from mpxla.graph.python.answers import Answers
from mpxla.graph.python.counts import Counts
from mpxla.graph.python.decisions import Tape
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import NO_VALUE, made_later, text_without_value
from mpxla.graph.python.number_functions import FUNCTIONS_OF_NUMBERS
from mpxla.graph.typed import SYMBOLIC
from mpxla.graph.user_code import (
    at_user_line,
)

__all__ = ["StepSemantics"]


class StepSemantics(TorchFunctionMode):
    """What torch calls mean while a step is captured.

    Every device that user code names reads as the host: which device a stage runs on is decided
    later. Real tensors that live elsewhere (constants of the user's function) are copied to the
    host once. Plain autograd is refused, since it would not see the stages.
    """

    def __init__(
        self,
        counts: Counts,
        own: OwnParameters,
        wholes: WholeParameters,
        flags: Flags,
        tape: Tape | None = None,
        answers: Answers | None = None,
        replicas: Sequence[int] = (),
        floats: Floats | None = None,
        joins: Joins | None = None,
    ) -> None:
        super().__init__()
        self.replicas = Replicas(replicas)
        self.own, self._counts, self._flags = own, counts, flags
        self._wholes = wholes
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.constants = Constants(tape, answers, floats)
        self.writes = HiddenWrites(self.constants.call, flags, wholes.check_write)
        own.detached = self.writes.contents.detached
        constants = self.constants
        self.selected = Selected(self.writes.call, constants.as_number, constants.has_value, counts)
        self.pieces = Pieces(self.writes.call, self.selected, counts, joins or Joins())
        # Whether a user's own autograd function is traced, and whether it may call autograd then.
        self.of_function = (False, False)
        if answers is not None:
            answers.is_function_traced = lambda: self.of_function[0]
        self._gradients = Gradients(flags, self.writes.contents.first)
        self._retained = Retained(flags, torch.autograd.grad, _losses)
        self._recurrences = Recurrences()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own_args, own_kwargs = self.own.stand_ins((tuple(args), kwargs or {}))
        found = self._meant(func, own_args, own_kwargs)
        # `self.mean += x` assigns what the write gives, which is to be the tensor that was there.
        is_of_script = bool(args) and type(args[0]) is torch.Tensor and found is own_args[0]
        return args[0] if is_of_script else found

    def _meant(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._wholes.given(self.writes.call, func, args, kwargs)
        if (later := made_later(func, args)) is not None:
            return later
        if func in _AUTOGRAD and self.of_function == (True, False):
            raise DifferentiatesInsideError
        if func is torch.autograd.grad and (
            not self.of_function[0]
            or self._gradients.is_outside(args[0] if args else kwargs["outputs"])
        ):
            return self._gradients.grad(*args, **kwargs)
        if not self.of_function[0] and self._retained.takes(func, args, kwargs):
            with self:
                return self._retained.call(func, args, kwargs)
        if func in _AUTOGRAD and not self.of_function[0]:
            raise CaptureError(
                f"{func.__name__}() was called in a step function{at_user_line()}. Call "
                f"model.backward(loss) there: gradients have to flow through all stages. For the "
                f"gradient of an input alone: (g,) = torch.autograd.grad(loss, x), or "
                f"loss.backward(inputs=[x])."
            )
        if self.replicas.takes(func):
            with self:
                return self.replicas.call(func, args, kwargs)
        if isinstance(func, HigherOrderOperator) and func.name() in CONTROL_FLOW:
            with self:
                return CONTROL_FLOW[func.name()](*args, **kwargs)
        if func in _TEXTS and isinstance(args[0], FakeTensor):
            kind = f"{str(args[0].dtype)[6:]}{list(args[0].shape)}"
            is_number = func is torch.Tensor.__format__ and not args[0].dim()
            return text_without_value(kind, *args) if is_number else NO_VALUE.format(kind)
        if not all(self.of_function):
            refuse_gradients(func, args)
        if func is torch.Tensor.register_hook and not self.of_function[0]:
            contents = self.writes.contents
            with self:
                return hook_tensor(*args, **kwargs, is_late=lambda: contents.has_backward)
        if func is torch.Tensor.__deepcopy__:
            with self:
                return _deep_copy(*args)
        if has_sparse(func, args, kwargs):
            with self:
                return run_sparse(func, args, kwargs)
        if func == _GET_FLAG and (own := self._flags.of(args[0])) is not None:
            return own.requires_grad and not self._flags.is_frozen(own)
        if func in _SET_FLAG:
            value = bool([*args[1:], *kwargs.values(), True][0])
            if (own := self._flags.of(args[0])) is not None:
                self._flags.put(own, value)
                return args[0]
            if type(args[0]) is nn.Parameter and args[0].requires_grad != value:
                raise CaptureError(
                    f"The step function changes requires_grad of a parameter of shape "
                    f"{list(args[0].shape)} that belongs to no DistributedModel{at_user_line()}. "
                    f"Set it before the step call."
                )
            if value:
                self._gradients.becomes_leaf(args[0])
        if torch.is_grad_enabled() and getattr(func, "__name__", "") != "__get__":
            pytree.tree_map(_refuse_foreign_parameter, (args, kwargs))
        args, kwargs = pytree.tree_map(self._to_host, (args, kwargs))
        if self._counts.has_unknown:
            name = getattr(func, "__name__", "").strip("_")
            kinds = SYMBOLIC if name in _OF_NUMBERS else torch.SymBool
            args, kwargs = pytree.tree_map_only(kinds, self._counts.number_of, (args, kwargs))
        if func is torch.Tensor.to:
            args = (args[0], *(_device_of_name(a) for a in args[1:]))
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs = without_generator(func, kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], as_torch_reads(args[1]), *args[2:])
        recurrence = self._recurrences.function(func, args)
        if recurrence is not None:
            with self:
                return recurrence(*args, **kwargs)
        if self.pieces.takes(func):
            with self:
                pieces = self.pieces.answer(func, args, kwargs)
            if pieces is not None:
                return pieces
        if self._counts.takes_in_turn(func, args, kwargs):
            with self:
                return self._counts.in_turn(func, args, kwargs)
        if func is torch.Tensor.__getitem__:
            return self.selected.get(*args)
        if func is torch.Tensor.__setitem__:
            return self.selected.set(*args)
        if func in _VERDICTS:
            return self._verdict(_VERDICTS[func], args, kwargs)
        of_numbers = FUNCTIONS_OF_NUMBERS.get(func)
        if of_numbers is not None and self.constants.has_unknown_numbers((args, kwargs)):
            with self:
                return of_numbers(*args, **kwargs)
        func = CAPTURED_FUNCTIONS.get(func, func)
        if torch.is_grad_enabled() or not args or not isinstance(args[0], FakeTensor):
            return self._called(func, args, kwargs)
        with _known_as_before(args[0]):
            return self._called(func, args, kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], torch.Tensor) and self.constants.has_value(args[0]):
            return self.writes.call(func, args, kwargs)
        if self.of_function[0]:  # whose graph is another one: no question can be a result there
            return self.writes.call(func, args, kwargs)
        return self._counts.call(self.writes.call, func, args, kwargs)

    def _verdict(self, compare: Any, args: Any, kwargs: Any) -> bool:
        """Whether all elements pass a comparison, read as `bool(tensor)` reads it."""
        if compare is torch.eq and args[0].shape != [*args, *kwargs.values()][1].shape:
            return False
        passed = self.constants.call(compare, args, kwargs)
        verdict = self.constants.call(torch.all, (passed,), {})
        return self.constants.call(torch.Tensor.__bool__, (verdict,), {})

    def _to_host(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type != "meta":
            return torch.device("cpu")
        if isinstance(value, torch.Tensor) and _is_absent(value):
            if id(value) not in self._on_host:  # a constant, as on the rank that has its values
                with _disable_current_modes():
                    stand_in = torch.zeros(value.shape, dtype=value.dtype)
                self._on_host[id(value)] = value, stand_in
                self.constants.absent.add(id(stand_in))
            return self._on_host[id(value)][1]
        if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, nn.Parameter):
            if value.device.type == "meta":
                return value
            if id(value) not in self._on_host:  # keep the original alive: its id is the key
                with _disable_current_modes():  # the copy is a constant: XLA has no fake tensors
                    is_here = value.device.type == "cpu"
                    self._on_host[id(value)] = value, value if is_here else value.detach().cpu()
            return self._on_host[id(value)][1]
        return value

    def own_tensors(self, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The user's own tensors behind values that share memory with them, or with their copies.

        Export gives another tensor for a parameter, which tells nothing of writes and of `.data`.
        """
        owners = {memory(copy) or id(copy): own for own, copy in self._on_host.values()}
        return [owners.get(memory(value) or id(value), value) for value in values]


def _losses() -> Sequence[torch.Tensor]:
    """Those whose backward was called so far."""
    recorder = current_recorder()
    assert recorder is not None, "a step is captured"
    return recorder.objectives


def _is_absent(value: torch.Tensor) -> bool:
    """Whether a tensor was computed from parameters of other ranks, which have its values."""
    known = (torch.Tensor, nn.Parameter, FakeTensor)
    return type(value) not in known and value.device.type == "meta"


@contextlib.contextmanager
def _known_as_before(tensor: torch.Tensor) -> Generator[None]:
    """Keeps what is known of a tensor through a call that gives the tensor itself, unwritten.

    `loss.float()` of a float is the loss. Under `torch.no_grad()` the tracer would take it for what
    was computed there from here on, of which there is no gradient.
    """
    mode: Any = get_proxy_mode()
    known = None if mode is None else mode.tracer.tensor_tracker
    before, version = None if known is None else known.get(tensor), tensor._version
    yield
    if known is not None and before is not None and tensor._version == version:
        known[tensor] = before


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy that no gradient leaves, as `copy.deepcopy` makes it."""
    if id(tensor) not in memo:
        made = tensor.detach().clone()
        memo[id(tensor)] = made.requires_grad_() if tensor.requires_grad else made
    return memo[id(tensor)]


def _refuse_foreign_parameter(value: Any) -> None:
    """The model's own parameters are fake while a step is captured; these are real."""
    is_absent = isinstance(value, nn.Parameter) and _is_absent(value)
    if (type(value) is nn.Parameter or is_absent) and value.requires_grad:
        raise CaptureError(
            f"The step function uses a trainable parameter of shape {list(value.shape)} that is "
            f"not read from the model given to DistributedModel{at_user_line()}. Make it a "
            f"parameter of that model and read it there; or use it under torch.no_grad() if it "
            f"is constant."
        )


_OF_NUMBERS = frozenset(
    "as_tensor clamp clamp_max clamp_min clip eq fill floordiv ge gt le lerp lt "
    "masked_fill mod ne new_tensor pow remainder rfloordiv rmod rpow rsub "
    "tensor".split()
)
"""They take no sizes, and nothing that is computed with a size at once."""
_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_flag: Any = torch.Tensor.requires_grad
_GET_FLAG, _SET_FLAG = _flag.__get__, (torch.Tensor.requires_grad_, _flag.__set__)
_AUTOGRAD = (*BACKWARD, torch.autograd.grad)
_VERDICTS: dict[Any, Any] = {
    **dict.fromkeys((torch.equal, torch.Tensor.equal), torch.eq),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), torch.isclose),
}


def _device_of_name(value: Any) -> Any:
    """The host for `"cuda"` and for the index of a device."""
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return torch.device("cpu") if isinstance(value, str) or is_index else value
