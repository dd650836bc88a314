"""Losses over words whose scores are split: each rank sees the scores of its own words only.

A head that is split by words gives its scores to all ranks, and the loss reads them:

    before   product -> gather [tokens, words] -> reshape, casts -> cross entropy
    after    product -> reshape, casts -> cross entropy of parts    (a maximum and two sums a token)

So no rank has the scores of all words, which are the largest value of a language model. (Megatron-
LM, arXiv:1909.08053, section 3.) Scores that the step uses otherwise are still gathered.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mpxla.graph.collectives import CROSS_ENTROPY, GATHER, resized
from mpxla.graph.stepgraph import CASTS, VIEWS, StepGraph
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["divide_losses"]

_aten = torch.ops.aten


def divide_losses(step: StepGraph) -> StepGraph:
    """Lets cross entropies read the parts of gathered scores, in place.

    Others than the plain one (weights of classes, smoothed labels, probabilities as labels) and
    scores that are changed on the way stay as they are.
    """
    for node in list(step.graph.nodes):
        if node.target is not _aten.cross_entropy_loss.default:
            continue
        scores, labels, *_ = arguments_of(node)
        options = named_arguments(node)
        chain = _way_from_gather(scores)
        if chain is None or not _is_plain(scores, labels, options):
            continue
        with step.graph.inserting_before(node):
            part = _on_parts(step.graph, chain)
            size, index, group = chain[0].args[2:]
            arguments = part, labels, size, index, options["reduction"], options["ignore_index"]
            loss = step.graph.call_function(CROSS_ENTROPY, (*arguments, group))
        loss.meta = dict(node.meta)
        node.replace_all_uses_with(loss)
    step.graph.eliminate_dead_code()
    return step


def _is_plain(scores: fx.Node, labels: fx.Node, options: Mapping[str, Any]) -> bool:
    is_plain = options["weight"] is None and not options["label_smoothing"]
    is_list = scores.meta["val"].dim() == 2 and labels.meta["val"].dim() == 1
    return is_plain and is_list and not labels.meta["val"].is_floating_point()


def _way_from_gather(node: Any) -> list[fx.Node] | None:
    """The gather of all words and what is done to its rows, in order; None for other values."""
    chain = [node]
    while chain[0].target is not GATHER:
        node = chain[0]
        if node.target not in (*VIEWS, *CASTS, _aten.slice.Tensor):
            return None
        source = node.all_input_nodes[0]
        before, after = source.meta["val"], node.meta["val"]
        keeps_rows = before.dim() and after.dim() and before.shape[-1] == after.shape[-1]
        if not keeps_rows:
            return None
        if node.target is _aten.slice.Tensor:
            if named_arguments(node)["dim"] % before.dim() == before.dim() - 1:
                return None
        chain.insert(0, source)
    return chain if chain[0].args[1] == chain[0].meta["val"].dim() - 1 else None


def _on_parts(graph: fx.Graph, chain: list[fx.Node]) -> fx.Node:
    """What is done to gathered rows, done to the own part of each."""
    part = input_of(chain[0])
    own = part.meta["val"].shape[-1]
    for node in chain[1:]:
        args = (part, *arguments_of(node)[1:])
        if node.target in VIEWS:
            args = (part, [*arguments_of(node)[1][:-1], own])
        copy = graph.call_function(target_of(node), args, dict(node.kwargs))
        copy.meta = dict(node.meta)
        whole, requires_grad = node.meta["val"], part.meta["val"].requires_grad
        with whole.fake_mode:
            copy.meta["val"] = resized(whole, -1, own).requires_grad_(requires_grad)
        part = copy
    return part
