"""One layer of a recurrent network in one direction, as an operator of a captured step.

    input [T, B, F], mask [T, B], states [B, H], weights -> output [T, B, H], states [B, H]

Where the mask is false, a sequence takes no step: its states stay, and the output repeats them. So
sequences of several lengths run side by side, from either end. Without a mask all steps are taken.

In the step it is one operator, however long the sequences are. `lowered` gives what runs in its
place where a stage is traced: a loop over the steps. This module must not know who packs sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["LAYER", "KINDS", "lowered"]

States = Sequence[torch.Tensor]
"""What a sequence has after a step, [B, H] each; the first is the output."""
_Cell = Callable[[torch.Tensor, States, Callable[[torch.Tensor], torch.Tensor]], States]
"""(product of the input and its weights [B, gates], states, product with a state) -> states."""


def _lstm(gates: torch.Tensor, states: States, product: Any) -> States:
    hidden, cell = states
    enter, forget, new, leave = (gates + product(hidden)).chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(gates: torch.Tensor, states: States, product: Any) -> States:
    (hidden,) = states
    reset, update, new = gates.chunk(3, 1)
    of_reset, of_update, of_new = product(hidden).chunk(3, 1)
    new = (new + of_new * (reset + of_reset).sigmoid()).tanh()
    return ((hidden - new) * (update + of_update).sigmoid() + new,)


def _plain(function: Callable[[torch.Tensor], torch.Tensor]) -> _Cell:
    def step(gates: torch.Tensor, states: States, product: Any) -> States:
        return (function(gates + product(states[0])),)

    return step


KINDS: Mapping[str, _Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _plain(torch.tanh),
    "rnn_relu": _plain(torch.relu),
}


def _run(
    input: torch.Tensor,
    mask: torch.Tensor | None,
    states: States,
    weights: Sequence[torch.Tensor],
    kind: str,
    is_reversed: bool,
) -> list[torch.Tensor]:
    """Weights are those of torch's layers: of inputs, of states, their biases, of a projection."""
    has_projection = len(weights) % 2 == 1
    of_input, of_state, *biases = weights[:-1] if has_projection else weights
    input_bias, state_bias = biases or (None, None)
    gates = F.linear(input, of_input, input_bias).unbind(0)
    taken = None if mask is None else mask.unsqueeze(-1).unbind(0)
    outputs: list[torch.Tensor] = []
    steps = range(len(gates))
    for step in reversed(steps) if is_reversed else steps:
        new = KINDS[kind](gates[step], states, lambda h: F.linear(h, of_state, state_bias))
        if has_projection:
            new = (F.linear(new[0], weights[-1]), *new[1:])
        if taken is not None:
            pairs = zip(new, states, strict=True)
            new = [torch.where(taken[step], one, old) for one, old in pairs]
        states = new
        outputs.append(states[0])
    # Results of an operator share no memory.
    return [torch.stack(outputs[::-1] if is_reversed else outputs), *(s.clone() for s in states)]


def _shapes(
    input: torch.Tensor, mask: torch.Tensor | None, states: States, *_: Any
) -> list[torch.Tensor]:
    output = input.new_empty((*input.shape[:2], states[0].shape[1]))
    return [output, *(input.new_empty(state.shape) for state in states)]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.inputs = inputs


def _derivative(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """While a step is captured there are no values: it only says what depends on what."""
    input, mask, states, weights, *rest = ctx.inputs
    leaves, count = [input, *states, *weights], 1 + len(states)
    if isinstance(input, FakeTensor):
        found = [torch.zeros_like(leaf) for leaf in leaves]
    else:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            results = _run(leaves[0], mask, leaves[1:count], leaves[count:], *rest)
            found = list(torch.autograd.grad(results, leaves, gradients))
    return found[0], None, found[1:count], found[count:], None, None


_library = torch.library.Library("mpxla_recurrent", "DEF")
_library.define(
    "layer(Tensor input, Tensor? mask, Tensor[] states, Tensor[] weights, str kind, "
    "bool is_reversed) -> Tensor[]"
)
_library.impl("layer", _run, "CompositeExplicitAutograd")
torch.library.register_fake("mpxla_recurrent::layer", _shapes, lib=_library)
torch.library.register_autograd(
    "mpxla_recurrent::layer", _derivative, setup_context=_keep_inputs, lib=_library
)
LAYER = torch.ops.mpxla_recurrent.layer.default


def lowered(target: Any) -> Callable[..., list[torch.Tensor]] | None:
    """What is traced in the place of the operator; None for others."""
    return _run if target is LAYER else None
