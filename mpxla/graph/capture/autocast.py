"""`torch.autocast` while a step is captured: regions of any kind of device apply to host fakes.

So user code reads the dtypes that tensors will have, and export records the casts. A region keeps
its kind, because PyTorch's lists differ: `softmax` is computed in float32 under `cuda` and `xla`,
and in the type of its argument under `cpu`.
"""

import contextlib
import functools
import warnings
from collections.abc import Generator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._C import DispatchKey, DispatchKeySet
from torch._export.passes import replace_set_grad_with_hop_pass
from torch.amp import autocast_mode

from mpxla.errors import CaptureError
from mpxla.graph.capture.autocast_lists import LISTS, Policy, cast_arguments
from mpxla.graph.exchanged import exchanged
from mpxla.graph.user_code import at_user_line

__all__ = ["host_autocast"]

_DEVICES = ("xla", "cuda")
"""Kinds of devices that the host's fakes stand for."""
_HOST_KEY = DispatchKeySet(DispatchKey.AutocastCPU)


class _Kernels:
    """The host's autocast kernels, exchanged for ones that follow the list of another device.

    PyTorch finds an operator's casts by its dispatch key `AutocastCPU`: all operators are reached
    in that way, also those that PyTorch's own functions call. The innermost region's list counts.
    """

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self._followed = "cpu"
        self._library: Any = None

    def enter(self, kind: str) -> None:
        """Called when a region is entered, enabled or not."""
        self._kinds.append(kind)
        self._follow(kind)

    def leave(self) -> None:
        """Called when it is left. Outside of regions no kernel is asked."""
        self._kinds.pop()
        if self._kinds:
            self._follow(self._kinds[-1])

    def restore(self) -> None:
        """Gives the host its own kernels back."""
        if self._library is not None:
            self._library._destroy()
        self._library = None

    def _follow(self, kind: str) -> None:
        if kind == self._followed:
            return
        self.restore()
        self._followed = kind
        if kind not in LISTS:
            return
        own: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")  # pyright: ignore[reportPrivateUsage]
        names = {name.removeprefix("aten::") for name in own if name.startswith("aten::")}
        self._library = torch.library.Library("aten", "IMPL", "AutocastCPU")
        with warnings.catch_warnings():
            # PyTorch says that a kernel is overridden.
            warnings.simplefilter("ignore")
            for name in sorted(names.union(LISTS[kind])):
                operator = _operator(name)
                if operator is not None:
                    kernel = functools.partial(_call, operator, name, LISTS[kind].get(name))
                    self._library.impl(operator, kernel, "AutocastCPU", allow_override=True)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _call(operator: Any, name: str, policy: Policy | None, *args: Any, **kwargs: Any) -> Any:
    if policy is Policy.BANNED:
        raise CaptureError(
            f"{name} is called under torch.autocast{at_user_line()}, where PyTorch refuses it: in "
            f"16 bits it overflows. Use binary_cross_entropy_with_logits without the sigmoid, or "
            f"call it under torch.autocast(..., enabled=False) on float32 values."
        )
    with torch._C._ExcludeDispatchKeyGuard(_HOST_KEY):  # pyright: ignore[reportPrivateUsage]
        if policy is not None:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            leaves = cast_arguments(policy, leaves, torch.get_autocast_dtype("cpu"))
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return operator(*args, **kwargs)


@contextlib.contextmanager
def host_autocast() -> Generator[None]:
    """Makes autocast regions of devices apply to the host's fakes, also one around the step."""
    kind: Any = torch.autocast
    module: Any = autocast_mode
    make, enter, leave = kind.__init__, kind.__enter__, kind.__exit__
    plain_cast = module._cast
    outer: list[tuple[bool, torch.dtype]] = []
    kernels = _Kernels()

    def make_enabled(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        # PyTorch switches regions for CUDA off where there is none.
        own = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        known = "xla" if device_type == "cuda" else device_type
        make(self, known, own, enabled, cache_enabled)
        self.device = device_type

    def enter_on_host(self: Any) -> Any:
        outer.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        kernels.enter(self.device)
        # Under its own name, by which it is recorded, and which user code asks for.
        entered = enter(self)
        if self.device in _DEVICES:
            _set_host(self._enabled, self.fast_dtype)
        return entered

    def leave_on_host(self: torch.autocast, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            kernels.leave()
            _set_host(*outer.pop())

    def cast_on_host(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return plain_cast(value, "cpu" if device_type in _DEVICES else device_type, dtype)

    methods = {"__init__": make_enabled, "__enter__": enter_on_host, "__exit__": leave_on_host}
    own_cast = exchanged(module, _cast=cast_on_host)  # of `custom_fwd`
    switches: Any = replace_set_grad_with_hop_pass
    own_switch = exchanged(switches, _is_set_grad_enabled_sub_mod=_switches_gradients)
    try:
        with exchanged(kind, **methods), own_cast, own_switch, _region_around():
            yield
    finally:
        kernels.restore()


def _switches_gradients(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
    """Whether export should keep that a part of the program is under `torch.no_grad()`.

    Torch's own function looks at the part's first operator only. In an autocast region that is the
    region's begin, which export repeats in every part, and the part would get gradients.
    """
    if node.op != "call_module":
        return False
    part: Any = getattr(node.graph.owning_module, str(node.target))
    found = [n for n in part.graph.nodes if n.target is torch._C._set_grad_enabled]  # pyright: ignore[reportPrivateUsage]
    if not found:
        return False
    return not omit_if_same_with_ambient or found[0].args[0] != torch.is_grad_enabled()


def _set_host(is_enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cpu", is_enabled)
    torch.set_autocast_dtype("cpu", dtype)


@contextlib.contextmanager
def _region_around() -> Generator[None]:
    """An autocast region entered around the step for the device."""
    for device_type in _DEVICES:
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type)):
                yield
            return
    yield
