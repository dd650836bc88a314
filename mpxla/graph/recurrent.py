"""One layer of a recurrent network in one direction, as operators of a captured step.

    layer   input [T, B, F], mask [T, B], states [B, H], weights -> output [T, B, H], last states
    steps   what the layer does after the product of its input and weights, [T, B, gates]
            -> the states after every step, [T, B, H] each

Where the mask is false, a sequence takes no step: its states stay, and the output repeats them. So
sequences of several lengths run side by side, from either end. Without a mask all steps are taken.

In the step a layer is one operator, however long the sequences are. `unrolled` or `looped` runs in
its place where a stage is traced: the first writes every step with operators of ATen; the second
leaves `steps`, and its derivative, to a backend that has loops. This module must not know who packs
sequences.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from mpxla.graph.typed import Function

__all__ = ["DERIVATIVE", "KINDS", "LAYER", "STEPS", "Weights", "looped", "unrolled"]

States = Sequence[Any]
"""What a sequence has after a step, [B, H] each; the first is the output."""


class Weights(NamedTuple):
    """Those of the states: [gates, H], [gates], and of a projection [P, H]."""

    of_state: Any
    bias: Any
    projection: Any

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Weights":
        """From a list without those that a layer has not."""
        others = {weight.ndim: weight for weight in given[1:]}
        return cls(given[0], others.get(1), others.get(2))


def _lstm(gates: torch.Tensor, product: torch.Tensor, states: States) -> States:
    enter, forget, new, leave = (gates + product).chunk(4, 1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(gates: torch.Tensor, product: torch.Tensor, states: States) -> States:
    reset, update, new = gates.chunk(3, 1)
    of_reset, of_update, of_new = product.chunk(3, 1)
    new = (new + of_new * (reset + of_reset).sigmoid()).tanh()
    return ((states[0] - new) * (update + of_update).sigmoid() + new,)


KINDS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, States], States]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda gates, product, states: ((gates + product).tanh(),),
    "rnn_relu": lambda gates, product, states: ((gates + product).relu(),),
}
"""(product of the input [B, gates], that of the output before, states) -> states after a step."""


def _unrolled_steps(
    gates: torch.Tensor,
    mask: torch.Tensor | None,
    states: States,
    weights: Sequence[torch.Tensor],
    kind: str,
    is_reversed: bool,
) -> list[torch.Tensor]:
    of_state, bias, projection = Weights.of(weights)
    taken = itertools.repeat(None) if mask is None else mask.unsqueeze(-1).unbind(0)
    steps = list(zip(gates.unbind(0), taken, strict=False))
    found: list[States] = []
    for entered, is_taken in reversed(steps) if is_reversed else steps:
        new = KINDS[kind](entered, F.linear(states[0], of_state, bias), states)
        if projection is not None:
            new = F.linear(new[0], projection), *new[1:]
        if is_taken is not None:
            pairs = zip(new, states, strict=True)
            new = [torch.where(is_taken, one, old) for one, old in pairs]
        states = new
        found.append(states)
    return [torch.stack(s) for s in zip(*(found[::-1] if is_reversed else found), strict=True)]


class _Looped(Function):
    """`steps` with its derivative as another operator."""

    @staticmethod
    def forward(ctx: Any, count: int, kind: str, is_reversed: bool, *tensors: Any) -> Any:
        gates, mask, *others = tensors
        found = STEPS(gates, mask, others[:count], others[count:], kind, is_reversed)
        ctx.save_for_backward(*tensors, *found)
        ctx.options = count, kind, is_reversed
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        count, kind, is_reversed = ctx.options
        gates, mask, *others = ctx.saved_tensors
        states, weights, found = others[:count], others[count:-count], others[-count:]
        of_gates, *rest = DERIVATIVE(
            gradients, gates, mask, states, weights, found, kind, is_reversed
        )
        return None, None, None, of_gates, None, *rest


def _looped_steps(
    gates: Any, mask: Any, states: Any, weights: Any, kind: str, is_reversed: bool
) -> list[torch.Tensor]:
    return list(_Looped.apply(len(states), kind, is_reversed, gates, mask, *states, *weights))


def _layer(run: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    def layer(
        input: torch.Tensor,
        mask: torch.Tensor | None,
        states: States,
        weights: Sequence[torch.Tensor],
        kind: str,
        is_reversed: bool,
    ) -> list[torch.Tensor]:
        # As torch lists them: of inputs, of states, biases of both, of a projection.
        of_input, *own = weights
        bias = own.pop(1) if len(own) > 2 else None
        gates = F.linear(input, of_input, bias)
        found = run(gates, mask, states, own, kind, is_reversed)
        # Results of an operator share no memory.
        return [found[0], *(states[0 if is_reversed else -1].clone() for states in found)]

    return layer


unrolled = _layer(_unrolled_steps)
looped = _layer(_looped_steps)


def _derivative(
    gradients: Any, gates: Any, mask: Any, states: Any, weights: Any, found: Any, *rest: Any
) -> list[torch.Tensor]:
    """Of gates, states and weights; `found` is what the steps have given."""
    return _differentiated(_unrolled_steps, gradients, gates, mask, states, weights, *rest)


def _differentiated(
    run: Callable[..., list[torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    first: torch.Tensor,
    mask: torch.Tensor | None,
    states: States,
    weights: Sequence[torch.Tensor],
    *rest: Any,
) -> list[torch.Tensor]:
    """Gradients of the first argument, states and weights, one after the other."""
    leaves = [leaf.detach().requires_grad_() for leaf in (first, *states, *weights)]
    count = 1 + len(states)
    with torch.enable_grad():
        results = run(leaves[0], mask, leaves[1:count], leaves[count:], *rest)
        return list(torch.autograd.grad(results, leaves, gradients))


def _shapes(
    input: torch.Tensor, mask: torch.Tensor | None, states: States, *_: Any
) -> list[torch.Tensor]:
    output = input.new_empty((*input.shape[:2], states[0].shape[1]))
    return [output, *(torch.empty_like(state) for state in states)]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.inputs = inputs


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """While a step is captured there are no values: it only says what depends on what."""
    input, _, states, weights, *_ = ctx.inputs
    if isinstance(input, FakeTensor):
        found = [torch.zeros_like(leaf) for leaf in (input, *states, *weights)]
    else:
        found = _differentiated(unrolled, gradients, *ctx.inputs)
    count = 1 + len(states)
    return found[0], None, found[1:count], found[count:], None, None


_library = torch.library.Library("mpxla_recurrent", "DEF")


def _operations(input: Any, mask: Any, states: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Of a layer's products, from the shapes of what it is given."""
    return 2 * input[0] * input[1] * sum(math.prod(w) for w in weights if len(w) == 2)


def _define(name: str, arguments: str, function: Any, shapes: Any) -> Any:
    _library.define(f"{name}({arguments}, str kind, bool is_reversed) -> Tensor[]")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpxla_recurrent::{name}", shapes, lib=_library)
    return getattr(torch.ops.mpxla_recurrent, name).default


_GIVEN = "Tensor? mask, Tensor[] states, Tensor[] weights"
LAYER = _define("layer", f"Tensor input, {_GIVEN}", unrolled, _shapes)
torch.library.register_autograd(
    "mpxla_recurrent::layer", _gradients, setup_context=_keep_inputs, lib=_library
)
register_flop_formula(torch.ops.mpxla_recurrent.layer)(_operations)
STEPS = _define(
    "steps",
    f"Tensor gates, {_GIVEN}",
    _unrolled_steps,
    lambda gates, mask, states, *_: [s.new_empty((len(gates), *s.shape)) for s in states],
)
DERIVATIVE = _define(
    "steps_backward",
    f"Tensor[] gradients, Tensor gates, {_GIVEN}, Tensor[] found",
    _derivative,
    lambda _, gates, mask, states, weights, *__: [
        torch.empty_like(value) for value in (gates, *states, *weights)
    ],
)
