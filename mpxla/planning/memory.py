"""Bytes that a device holds: parameters with their state, and what forwards keep for backwards.

The activations of a layer are those that Korthikanti et al. count ("Reducing Activation
Recomputation in Large Transformer Models", 2022, section 4), written for any width of the parts.
For GPT in 16 bits they are theirs: s b h (10 + 24 / t + 5 a s / (h t)), where t devices share a
layer; with sequence parallelism the 10 is divided by t as well.
"""

import functools

from mpxla.planning.layout import PRECISIONS, Layout
from mpxla.planning.transformer import Transformer

__all__ = [
    "device_layer_weights",
    "device_parameters",
    "fixed_bytes",
    "kept_bytes",
    "layer_activation_bytes",
    "saved_bytes",
    "scores_bytes",
    "spread_layers",
]


@functools.lru_cache(maxsize=256)
def spread_layers(model: Transformer, num_stages: int) -> tuple[int, ...]:
    """Layers of every stage, so that the longest is shortest; the head counts as its products do.

    Returns:
        At least one layer per stage; where it makes no difference, early stages get more.
    """
    head = model.head_weights / (model.layer_weights + model.attention_flops / 2)
    load = [0.0] * (num_stages - 1) + [head]
    counts = [0] * num_stages
    for left in range(model.layers, 0, -1):
        empty = [stage for stage in range(num_stages) if not counts[stage]]
        choice = empty if left <= len(empty) else range(num_stages)
        stage = min(choice, key=lambda s: (load[s] + 1, s))
        load[stage] += 1
        counts[stage] += 1
    return tuple(counts)


def device_layer_weights(model: Transformer, tensor: int) -> float:
    """Weights of a layer's matrices on a device; a key-value head is never cut, but repeated."""
    keys_and_values = 2 * model.hidden * model.kv_width
    own = (model.layer_weights - keys_and_values) / tensor
    return own + keys_and_values / min(tensor, model.kv_heads)


def device_parameters(model: Transformer, layout: Layout) -> tuple[float, ...]:
    """Parameters of every stage on a device; norms and biases are whole on each.

    A tied table is on the first stage and on the last.
    """
    rest = model.layer_parameters - model.layer_weights
    per_layer = device_layer_weights(model, layout.tensor) + rest
    found = [count * per_layer for count in spread_layers(model, layout.num_stages)]
    found[0] += model.embedding_parameters / layout.tensor
    if layout.num_stages > 1 or not model.tied_embeddings:
        found[-1] += model.head_weights / layout.tensor
    found[-1] += model.hidden * (1 + model.biases)
    return tuple(found)


def parameter_bytes(model: Transformer, layout: Layout) -> tuple[float, ...]:
    """Bytes of weights, gradients and optimizer state of every stage on a device."""
    bytes_of = PRECISIONS[layout.precision]
    state = bytes_of.state / (layout.data if layout.shard_optimizer_state else 1)
    each = bytes_of.weight + bytes_of.gradient + state
    return tuple(count * each for count in device_parameters(model, layout))


def fixed_bytes(model: Transformer, layout: Layout) -> list[float]:
    """Per pipeline rank, what a device holds throughout: parameters, and room to compute again."""
    fixed = [working_bytes(model, layout)] * layout.stages
    for rank, size in zip(layout.placement, parameter_bytes(model, layout), strict=True):
        fixed[rank] += size
    return fixed


def scores_bytes(model: Transformer, layout: Layout) -> float:
    """What the scores of a layer keep for one microbatch: after softmax, a mask, after dropout."""
    if model.flash_attention:
        return 0.0
    each = PRECISIONS[layout.precision].activation
    per_score = 2 * each + 1 if model.dropout else each
    return _tokens(model, layout) * model.heads * model.sequence_length * per_score / layout.tensor


def layer_activation_bytes(model: Transformer, layout: Layout) -> float:
    """Everything that a layer keeps for one microbatch if nothing is computed again."""
    each, hidden = PRECISIONS[layout.precision].activation, model.hidden
    # Inputs of both norms, of the query-key-value product and of the feed-forward part; masks.
    whole = hidden * (4 * each + 2 * model.dropout)
    # Queries, input of the output projection; input of the activation, input of the last product.
    split = each * (2 * hidden + (2 + model.gated_ffn) * model.ffn) / layout.tensor
    split += each * 2 * model.kv_width / min(layout.tensor, model.kv_heads)
    per_token = whole / _position_shares(layout) + split
    return _tokens(model, layout) * per_token + scores_bytes(model, layout)


def saved_bytes(model: Transformer, layout: Layout) -> tuple[int, ...]:
    """Per stage, what a forward keeps for its backward, for one microbatch."""
    layer = layer_activation_bytes(model, layout)
    if layout.recompute == "selective":
        layer -= scores_bytes(model, layout)
    elif layout.recompute == "full":
        layer = _residual_bytes(model, layout)
    return _with_ends(model, layout, layer)


def kept_bytes(model: Transformer, layout: Layout) -> tuple[int, ...]:
    """Per stage, what the first part of a split backward keeps for the second.

    Weight gradients need the inputs of all products and the gradients of their results, about as
    much as a forward keeps without scores. What was computed again is kept, too.
    """
    layer = layer_activation_bytes(model, layout) - scores_bytes(model, layout)
    return _with_ends(model, layout, layer)


def working_bytes(model: Transformer, layout: Layout) -> float:
    """What one layer needs while its backward computes again."""
    if layout.recompute == "none":
        return 0.0
    whole = layer_activation_bytes(model, layout)
    return whole if layout.recompute == "full" else scores_bytes(model, layout)


def _with_ends(model: Transformer, layout: Layout, layer: float) -> tuple[int, ...]:
    """Adds the mask behind the embedding, the inputs of final norm and head, and fp32 logits."""
    found = [count * layer for count in spread_layers(model, layout.num_stages)]
    tokens = _tokens(model, layout)
    if model.dropout:
        found[0] += tokens * model.hidden / _position_shares(layout)
    found[-1] += 2 * _residual_bytes(model, layout) + 4 * tokens * model.vocab / layout.tensor
    return tuple(map(round, found))


def _residual_bytes(model: Transformer, layout: Layout) -> float:
    """The residual stream of one microbatch, where devices share positions: their part."""
    each = PRECISIONS[layout.precision].activation
    return _tokens(model, layout) * model.hidden * each / _position_shares(layout)


def _position_shares(layout: Layout) -> int:
    return layout.tensor if layout.sequence_parallel else 1


def _tokens(model: Transformer, layout: Layout) -> int:
    return layout.microbatch_size * model.sequence_length
