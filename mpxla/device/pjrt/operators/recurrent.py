"""The steps of recurrent layers, as loops: programs are as large for long sequences as for short.

The derivative runs the loop from its other end. Of all steps at once it computes what needs no
order: products of the states before each step, and gradients of weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpxla.device.pjrt.table import FUNCTIONS
from mpxla.graph.recurrent import DERIVATIVE, STEPS, Weights

States = Sequence[jax.Array]


def _lstm(gates: jax.Array, product: jax.Array, states: States) -> States:
    enter, forget, new, leave = jnp.split(gates + product, 4, 1)
    cell = jax.nn.sigmoid(forget) * states[1] + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return [jax.nn.sigmoid(leave) * jnp.tanh(cell), cell]


def _gru(gates: jax.Array, product: jax.Array, states: States) -> States:
    reset, update, new = jnp.split(gates, 3, 1)
    of_reset, of_update, of_new = jnp.split(product, 3, 1)
    new = jnp.tanh(new + of_new * jax.nn.sigmoid(reset + of_reset))
    return [(states[0] - new) * jax.nn.sigmoid(update + of_update) + new]


_CELLS: Mapping[str, Callable[[jax.Array, jax.Array, States], States]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda gates, product, states: [jnp.tanh(gates + product)],
    "rnn_relu": lambda gates, product, states: [jax.nn.relu(gates + product)],
}
"""See `KINDS` in `mpxla/graph/recurrent.py`."""


def _product(outputs: jax.Array, weights: Weights) -> jax.Array:
    found = outputs @ weights.of_state.T
    return found if weights.bias is None else found + weights.bias


def _chosen(mask: jax.Array | None, values: Sequence[Any], others: Sequence[Any]) -> States:
    if mask is None:
        return list(values)
    return [jnp.where(mask[:, None], a, b) for a, b in zip(values, others, strict=True)]


def _steps(
    gates: jax.Array,
    mask: jax.Array | None,
    states: States,
    weights: Sequence[jax.Array],
    kind: str,
    is_reversed: bool,
) -> States:
    known = Weights.of(weights)

    def step(states: States, given: Any) -> tuple[States, States]:
        entered, taken = given
        new = list(_CELLS[kind](entered, _product(states[0], known), states))
        if known.projection is not None:
            new[0] = new[0] @ known.projection.T
        new = _chosen(taken, new, states)
        return new, new

    return lax.scan(step, list(states), (gates, mask), reverse=is_reversed)[1]


def _derivative(
    gradients: States,
    gates: jax.Array,
    mask: jax.Array | None,
    states: States,
    weights: Sequence[jax.Array],
    found: States,
    kind: str,
    is_reversed: bool,
) -> States:
    known = Weights.of(weights)
    before = [
        jnp.concatenate([f[1:], s[None]] if is_reversed else [s[None], f[:-1]])
        for s, f in zip(states, found, strict=True)
    ]

    def step(later: States, given: Any) -> Any:
        entered, product, before, taken, wanted = given
        total = [a + b for a, b in zip(later, wanted, strict=True)]
        none = [0] * len(total)
        stayed = none if taken is None else _chosen(taken, none, total)
        of_new = of_cell = _chosen(taken, total, none)
        new, pull = jax.vjp(_CELLS[kind], entered, product, before)
        if known.projection is not None:
            of_cell = [of_new[0] @ known.projection, *of_new[1:]]
        of_gates, of_product, of_before = pull(of_cell)
        of_before = [of_before[0] + of_product @ known.of_state, *of_before[1:]]
        of_before = [a + b for a, b in zip(of_before, stayed, strict=True)]
        return of_before, (of_gates, of_product, of_new[0], new[0])

    given = gates, _product(before[0], known), before, mask, list(gradients)
    start = [jnp.zeros_like(state) for state in states]
    of_states, made = lax.scan(step, start, given, reverse=not is_reversed)
    of_gates, of_products, of_outputs, outputs = made
    of_weights = {
        "of_state": jnp.einsum("tbg,tbh->gh", of_products, before[0]),
        "bias": of_products.sum((0, 1)),
        "projection": jnp.einsum("tbp,tbh->ph", of_outputs, outputs),
    }
    return [
        of_gates,
        *of_states,
        *(of_weights[name] for name, w in known._asdict().items() if w is not None),
    ]


FUNCTIONS[STEPS], FUNCTIONS[DERIVATIVE] = _steps, _derivative
