"""What holds around the user's function while a step is captured, undone afterwards.

Fake tensors stand for parameters and buffers, devices read as the host, plain autograd is refused,
and torch's exporter is quiet. This module must not know what the captured graph is used for.
"""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.jit._state import _enabled as jit_state  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.capture.attached import Attached
from mpxla.graph.capture.autocast import host_autocast
from mpxla.graph.capture.autograd import DifferentiatesInsideError
from mpxla.graph.capture.carried import CarriedError, Form, all_carried, form_of, is_carried
from mpxla.graph.capture.collectives import Replicas
from mpxla.graph.capture.constants import Constants
from mpxla.graph.capture.control_flow import CONTROL_FLOW
from mpxla.graph.capture.exporter import exporter_prepared
from mpxla.graph.capture.flags import Flags
from mpxla.graph.capture.functions import (
    CAPTURED_FUNCTIONS,
    checks_decide,
    cumulative_batch_norms,
    extremes_captured,
    flexible_attention_by_scores,
    nested_tensors_refused,
    torchs_recurrences,
    unchecked_distributions,
    without_generator,
)
from mpxla.graph.capture.gradient_hooks import hook_tensor
from mpxla.graph.capture.hooks import attributes_kept, refuse_gradients
from mpxla.graph.capture.own_parameters import OwnParameters, memory
from mpxla.graph.capture.pieces import Joins, Pieces
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.recurrent import Recurrences
from mpxla.graph.capture.retained import BACKWARD, Retained
from mpxla.graph.capture.selects import Selected
from mpxla.graph.capture.sparse import has_sparse, run_sparse
from mpxla.graph.capture.tensor_places import Attribute, attributes_of, is_constant
from mpxla.graph.capture.transformers import static_transformers
from mpxla.graph.capture.whole_parameters import WholeParameters
from mpxla.graph.capture.writes import HiddenWrites, described
from mpxla.graph.exchanged import exchanged, restored
from mpxla.graph.fakes import fake_tensor
from mpxla.graph.gradients import Gradients
from mpxla.graph.python.answers import Answers, modules_left
from mpxla.graph.python.counts import Counts
from mpxla.graph.python.decisions import Tape
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import NO_VALUE, made_later, text_without_value
from mpxla.graph.python.number_functions import FUNCTIONS_OF_NUMBERS
from mpxla.graph.shapes import static_shapes
from mpxla.graph.typed import SYMBOLIC
from mpxla.graph.user_code import (
    at_user_line,
    is_called_by_user,
    symbols_noted,
    user_lines_recorded,
)

__all__ = [
    "StepSemantics",
    "assigned_buffers_written",
    "carried_attributes_written",
    "parameter_attributes_written",
    "traceable",
]


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
        args, kwargs = self.own.stand_ins((tuple(args), kwargs or {}))
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


@contextlib.contextmanager
def traceable(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    trained: Collection[str],
    gone: list[tuple[nn.Module, str]],
    number_of: Callable[[Any], Any],
    floats: Floats,
) -> Generator[list[Attribute]]:
    """What export needs to trace a step of a model; gives the attributes of parameters.

    Stand-ins require gradients for the parameters that are `trained`, by any names. Attributes of
    modules that the step has given tensors are `gone` afterwards. `number_of` gives numbers that
    are read in the place of symbols. Modules that call `float` of those see that of `floats`.
    """
    with (
        attributes_kept(model, gone),
        _fake_state(model, fake_mode, trained) as attributes,
        host_autocast(),
        _inference_without_gradients(),
        _modules_stay(),
        _numbers_explained(),
        torch.compiler.set_stance("force_eager"),  # XLA compiles what torch.compile would
        exchanged(jit_state, enabled=False),  # nor does `torch.jit.script` compile: not our `math`
        exporter_prepared(),
        user_lines_recorded(),
        torchs_recurrences(),
        flexible_attention_by_scores(),
        unchecked_distributions(),
        checks_decide(),
        cumulative_batch_norms(),
        extremes_captured(number_of),
        floats.exchanged(number_of),
        nested_tensors_refused(),
        static_shapes(),
        modules_left(),
        static_transformers(),
    ):
        yield attributes


def _modules_stay() -> contextlib.AbstractContextManager[None]:
    """Lets `layer.to(x.device)` in a forward do nothing: stages have their devices.

    Torch would look at gradients, and exchange what parameters hold.
    """
    convert: Callable[..., nn.Module] = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        held = (*self.parameters(), *self.buffers())
        own = {t.dtype for t in held if t.is_floating_point() or t.is_complex()}
        return self if dtype is None or own <= {dtype} else convert(self, *args, **kwargs)

    def stay(self: nn.Module, *_: Any) -> nn.Module:
        return self

    return exchanged(nn.Module, to=to, cuda=stay, cpu=stay)


def _inference_without_gradients() -> contextlib.AbstractContextManager[None]:
    """Makes regions of `torch.inference_mode()` ones of `torch.no_grad()`, which export records."""
    entered: list[torch.set_grad_enabled] = []

    def enter(self: torch.inference_mode) -> None:
        entered.append(torch.set_grad_enabled(not self.mode))

    def leave(self: torch.inference_mode, *error: Any) -> None:
        entered.pop().__exit__(*error)

    kind: Any = torch.inference_mode
    return exchanged(kind, __enter__=enter, __exit__=leave)


@contextlib.contextmanager
def _numbers_explained() -> Generator[None]:
    """Numbers read by `.item()` say in the user's texts what they are, in place of `zuf0`.

    Torch's own code goes on to see its names of them.
    """

    def for_users(write: Any) -> Any:
        def text(self: Any, *spec: str) -> str:
            return NO_VALUE.format("number") if is_called_by_user() else write(self, *spec)

        return text

    with symbols_noted(), contextlib.ExitStack() as stack:
        for kind in (torch.SymFloat, torch.SymInt, torch.SymBool):
            texts = {name: for_users(getattr(kind, name)) for name in ("__repr__", "__format__")}
            stack.enter_context(exchanged(kind, **texts))
        yield


@contextlib.contextmanager
def _fake_state(
    model: nn.Module, fake_mode: FakeTensorMode, trained: Collection[str]
) -> Generator[list[Attribute]]:
    """Puts fake host tensors in the place of all parameters and buffers; undone on exit.

    Buffers that are constants are plain attributes meanwhile. Gives the attributes of
    parameters, which are buffers meanwhile, as carried attributes of modules are.
    """
    tables: list[dict[str, Any]] = [
        table
        for m in model.modules()
        for table in (m._parameters, m._buffers)  # pyright: ignore[reportPrivateUsage]
    ]
    fakes: dict[int, torch.Tensor] = {}
    named = model.named_parameters(remove_duplicate=False)
    require_grad = {id(parameter) for name, parameter in named if name in trained}

    def fake(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            made: Any = fake_tensor(fake_mode, tensor.shape, tensor.stride(), tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                made.requires_grad_(id(tensor) in require_grad)._is_param = True  # as nn.Parameter
            elif tensor.grad is not None:  # the script's, which the step must not miss
                made.grad = fake_tensor(fake_mode, tensor.shape, tensor.stride(), tensor.dtype)
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    attributes = [found for m in model.modules() for found in attributes_of(m)]
    carried = all_carried(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored(*tables))
        for m in model.modules():
            for name in [n for n, b in m._buffers.items() if is_constant(b)]:  # pyright: ignore[reportPrivateUsage]
                vars(m)[name] = m._buffers.pop(name)  # pyright: ignore[reportPrivateUsage]
                stack.callback(vars(m).pop, name)
        # Before their owners are others.
        values = [fake(found.get()) for found in attributes]
        for table in tables:
            table.update(
                {n: fake(tensor) for n, tensor in table.items() if not is_constant(tensor)}
            )
        for found, value in zip(attributes, values, strict=True):
            found.module._buffers[found.key] = value  # pyright: ignore[reportPrivateUsage]
        for one in carried:
            buffers = one.begin()
            stack.callback(one.restore)
            for key, (shape, dtype) in buffers.items():
                strides = torch.empty(shape, device="meta").stride()
                made = fake_tensor(fake_mode, shape, strides, dtype)
                one.module._buffers[key] = made  # pyright: ignore[reportPrivateUsage]
        yield attributes


@contextlib.contextmanager
def assigned_buffers_written(model: nn.Module, attached: Attached) -> Generator[None]:
    """Makes `self.buffer = new` in a forward what `self.buffer.copy_(new)` is.

    Export sees changes of a buffer's tensor only, and would drop another tensor in its place.

    Args:
        model: whose buffers they are.
        attached: gets what is found and left there.

    Raises:
        CarriedError: the new tensor has another shape or dtype, and the buffer is in no checkpoint:
            it is to be an attribute, which may change both.
        CaptureError: the same of a buffer that is in checkpoints.
    """
    modules = [(path, m, dict(m._buffers)) for path, m in model.named_modules()]  # pyright: ignore[reportPrivateUsage]
    for path, _, before in modules:
        for name, old in before.items():
            attached.find(f"{path}.{name}" if path else name, old)
    yield
    resized: list[tuple[nn.Module, str, Form]] = []
    for path, module, before in modules:
        table: dict[str, Any] = module._buffers  # pyright: ignore[reportPrivateUsage]
        for name, old in before.items():
            new = table[name]
            attached.leave(f"the buffer {path}{'.' if path else ''}{name}", old, new)
            if new is old:
                continue
            table[name] = old
            form = form_of(new)
            passing = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            is_kept = form is None or name not in passing
            if old is not None and new is not None and new.shape == old.shape:
                keeps_values = torch.can_cast(new.dtype, old.dtype)  # but for their precision
                if new.dtype is old.dtype or (is_kept and keeps_values):
                    old.copy_(new.detach())
                    continue
            if form is None or is_kept:
                raise CaptureError(
                    f"The step function assigns to the buffer {path}{'.' if path else ''}{name}, "
                    f"{described(old)}, another tensor, {described(new)}. Register it with the "
                    f"shape and dtype that it keeps, or with persistent=False if checkpoints need "
                    f"not have it."
                )
            resized.append((module, name, form))
    if resized:
        raise CarriedError(resized)


@contextlib.contextmanager
def carried_attributes_written(model: nn.Module, attached: Attached) -> Generator[None]:
    """Lets modules have the attributes that steps carry, and writes what they are given.

    Args:
        model: whose modules they are.
        attached: gets what is found and left there.

    Raises:
        CarriedError: one was given tensors of another form than it was to have.
        CaptureError: one had tensors, and lost them.
    """
    carried = all_carried(model)
    buffers = [one.show() for one in carried]
    register = nn.Module.register_buffer

    def register_buffer(
        self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        if is_carried(vars(self), name):  # it was a buffer before
            setattr(self, name, tensor)
        else:
            register(self, name, tensor, persistent)

    with exchanged(nn.Module, register_buffer=register_buffer):
        yield
    for one, held in zip(carried, buffers, strict=True):
        pairs = list(zip(held, one.end() or held, strict=True))
        for old, value in pairs:
            attached.leave(f"the attribute {one.name} of a {type(one.module).__name__}", old, value)
        # Copies first: some may be given to each other.
        for old, value in [(old, v.detach().clone()) for old, v in pairs if v is not old]:
            old.copy_(value)


@contextlib.contextmanager
def parameter_attributes_written(
    model: nn.Module,
    known: Sequence[Attribute],
    attached: Attached,
    is_copy: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Generator[list[Attribute]]:
    """Lets parameters have their attributes in a forward, and writes to these what it assigns.

    Gives a list for new ones that are copies of their parameters.

    Args:
        model: whose parameters they are.
        known: attributes that are buffers meanwhile.
        attached: gets what is left there.
        is_copy: whether a tensor has the values that a parameter had when the step began.

    Raises:
        CaptureError: an attribute is new, and anything else.
    """
    new: list[Attribute] = []
    before = [(found, found.table[found.slot]) for found in known]
    for found in known:
        setattr(found.owner, found.name, getattr(found.module, found.key))
    try:
        yield new
        for found in [a for module in model.modules() for a in attributes_of(module)]:
            value, old = vars(found.owner)[found.name], getattr(found.module, found.key, None)
            attached.leave(f"the attribute {found.name} of a parameter", old, value)
            if old is not None and old is not value:
                old.copy_(value.detach())
            elif old is None and is_copy(value, found.owner):
                new.append(found)
            elif old is None:
                raise CaptureError(
                    f"The step function gives the parameter {found.parameter} of a "
                    f"{type(found.module).__name__} a tensor as its attribute {found.name}, which "
                    f"the next microbatch or step could read. Assign it before the first step call "
                    f"(parameter.{found.name} = parameter.data.clone()), or make it a buffer."
                )
    finally:
        for found in [a for module in model.modules() for a in attributes_of(module)]:
            delattr(found.owner, found.name)
        for found, value in before:
            found.table[found.slot] = value
