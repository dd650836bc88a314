"""The lists of casts are those of the installed PyTorch: its kernels are asked, one by one."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpxla.graph.capture.autocast_lists import LISTS, Policy
from mpxla.tests.ranks.run import run_ranks

HALF = torch.bfloat16
OF_LIBRARIES = {
    *("_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention"),
}
"""Operators that exist for CUDA's libraries alone: no step on the host's fakes has them."""
KEYS = {"cuda": "AutocastCUDA", "xla": "AutocastXLA"}


def operators_with_kernels(key):
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    } - OF_LIBRARIES


class StoppedError(Exception):
    pass


class Casts(TorchDispatchMode):
    """Types that arguments are cast to, before anything is computed of them."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.types.append(kwargs["dtype"])
        if func.namespace == "prim" or func is torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        self.types += [v for v in (*args, *kwargs.values()) if v is torch.float32]
        raise StoppedError


def value_of(argument, tensor):
    kind = str(argument.type)
    if argument.has_default_value() and "Tensor" not in kind:
        return argument.default_value
    if kind in ("Tensor", "List[Tensor]"):
        return tensor() if kind == "Tensor" else [tensor(), tensor(), tensor()]
    return {
        "List[Optional[Tensor]]": [torch.zeros(4, dtype=torch.int64)],
        "int": 1,
        "bool": False,
        "number": 2.0,
        "float": 0.5,
        "str": "mean",
        "List[int]": [1, 1],
        "List[float]": [0.5, 0.5],
        "Optional[List[int]]": [1, 1],
    }.get(kind)


def casts_of(name, device, inputs):
    """Casts of a call with float tensors of these types in turns."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    with FakeTensorMode(allow_non_fake_inputs=True):
        turns = itertools.cycle(inputs)

        def tensor():
            return torch.empty(4, 4, device=device, dtype=next(turns))

        args, kwargs = [], {}
        for argument in operator._schema.arguments:
            value = value_of(argument, tensor)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        casts = Casts()
        try:
            with casts:
                operator(*args, **kwargs)
        except Exception as error:  # StoppedError, or what the kernel says of the shapes
            if "unsafe to autocast" in str(error):
                return "refused"
    return casts.types


def policy_in_torch(name, kind, device):
    """What the kernel does to arguments, from what it casts."""
    try:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, HALF)
        wide, narrow, mixed = (
            casts_of(name, device, inputs)
            for inputs in ([torch.float32], [HALF], [HALF, torch.float32])
        )
    finally:
        torch.set_autocast_enabled(kind, False)
    if wide == "refused":
        return Policy.BANNED
    if wide[:1] == [HALF]:
        return Policy.NARROW
    if narrow[:1] == [torch.float32]:
        return Policy.WIDE
    return Policy.WIDEST if mixed[:1] == [torch.float32] else None


def differences(kind, device):
    known, found = LISTS[kind], operators_with_kernels(KEYS[kind])
    of_names = {name for name in known if "imname" in name or "names_" in name}
    if found.isdisjoint(of_names):  # torch 2.13 has no named dimensions any more
        known = {name: policy for name, policy in known.items() if name not in of_names}
    problems = [f"only listed: {n}" for n in sorted(set(known) - found)]
    problems += [f"not listed: {n}" for n in sorted(found - set(known))]
    checked = 0
    for name in sorted(found & set(known)):
        policy = policy_in_torch(name, kind, device)
        checked += policy is not None
        if policy not in (None, known[name]):
            problems.append(f"{name}: {known[name]} here, {policy} in PyTorch")
    return problems, checked / len(known)


@pytest.mark.unit
def test_list_of_cuda_is_that_of_pytorch():
    problems, share = differences("cuda", "cuda")
    assert not problems
    # Of the others, kernels cannot be reached with the arguments made up here.
    assert share > 0.8, share


def differences_of_xla():
    import torch_xla  # noqa: F401  # registers the kernels

    return differences("xla", "xla:0")


@pytest.mark.torch_xla
@pytest.mark.ranks
def test_list_of_xla_is_that_of_torch_xla():
    ((problems, share),) = run_ranks(differences_of_xla, 1)
    assert not problems
    assert share > 0.8, share
