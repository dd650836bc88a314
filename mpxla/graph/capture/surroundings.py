"""What holds around the user's function while a step is captured, undone afterwards.

Fake tensors stand for parameters and buffers, and torch's exporter is quiet. This module must not
know what the captured graph is used for.
"""

import contextlib
from collections.abc import Callable, Collection, Generator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.jit._state import _enabled as jit_state  # pyright: ignore[reportPrivateUsage]

from mpxla.graph.capture.autocast import host_autocast
from mpxla.graph.capture.carried import all_carried
from mpxla.graph.capture.exporter import exporter_prepared
from mpxla.graph.capture.hooks import attributes_kept
from mpxla.graph.capture.tensor_places import Attribute, attributes_of, is_constant
from mpxla.graph.capture.torch_parts import (
    checks_decide,
    extremes_captured,
    functions_exchanged,
)
from mpxla.graph.capture.transformers import static_transformers
from mpxla.graph.exchanged import exchanged, restored
from mpxla.graph.fakes import fake_tensor
from mpxla.graph.python.answers import modules_left
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import NO_VALUE
from mpxla.graph.shapes import static_shapes
from mpxla.graph.user_code import (
    is_called_by_user,
    symbols_noted,
    user_lines_recorded,
)

__all__ = ["traceable"]


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
        functions_exchanged(),
        checks_decide(),
        extremes_captured(number_of),
        floats.exchanged(number_of),
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
