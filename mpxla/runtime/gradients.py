"""Complete gradients of a step on one rank: sums over the stages that share a parameter.

A parameter that several stages read (tied weights) is held by every rank that needs it. Its
gradient is summed on the first holder, in the order of ranks, and the sum goes back to the others,
so that all copies stay equal bit for bit.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from mpxla.runtime.executor import StepRun
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.plan import CutStep
from mpxla.stage.device import make_ready
from mpxla.stage.spec import TensorSpec

__all__ = ["collect_gradients"]


def collect_gradients(
    cut: CutStep, step: StepRun, pp_rank: int, link: PipelineLink, specs: Mapping[str, TensorSpec]
) -> dict[str, torch.Tensor]:
    """Gradients by parameter name, for the parameters that this rank holds.

    Every rank of the pipeline must call it after its last backward.

    Args:
        cut: the step in stages.
        step: the finished run.
        pp_rank: this rank.
        link: messages between pipeline ranks.
        specs: shape and dtype of every parameter.
    """
    local: dict[str, list[torch.Tensor]] = {}
    for stage in cut.stages:
        accumulators = step.accumulators.get(stage.index)
        if accumulators is not None:
            for name, value in zip(stage.trained, accumulators, strict=True):
                local.setdefault(name, []).append(value)
    gradients = {name: reduce(torch.add, parts) for name, parts in local.items()}
    for holders, names in _shared_parameters(cut).items():
        if pp_rank in holders:
            gradients.update(_share(cut, gradients, holders, names, pp_rank, link, specs))
    make_ready(gradients.values())
    return gradients


def _shared_parameters(cut: CutStep) -> dict[tuple[int, ...], list[str]]:
    """Trained parameters that several ranks hold, by the ranks that hold them."""
    holders_of = cut.parameter_ranks()
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(cut.trained_stages()):
        if len(holders_of[name]) > 1:
            groups.setdefault(holders_of[name], []).append(name)
    return groups


def _share(
    cut: CutStep,
    gradients: Mapping[str, torch.Tensor],
    holders: Sequence[int],
    names: Sequence[str],
    pp_rank: int,
    link: PipelineLink,
    specs: Mapping[str, TensorSpec],
) -> dict[str, torch.Tensor]:
    """Sums gradients over the ranks that hold the parameters."""
    contributed = {
        rank: [
            name
            for name in names
            if any(cut.placement[stage] == rank for stage in cut.trained_stages()[name])
        ]
        for rank in holders
    }
    first, *others = holders
    if pp_rank != first:
        mine = contributed[pp_rank]
        if mine:
            make_ready([gradients[name] for name in mine])
            link.send_to(first, [gradients[name] for name in mine], "tied")
        totals = link.receive_from(first, [specs[name] for name in names], "tied")()
        return dict(zip(names, totals, strict=True))
    parts = {name: [gradients[name]] if name in contributed[first] else [] for name in names}
    for rank in others:
        if contributed[rank]:
            arrived = link.receive_from(rank, [specs[n] for n in contributed[rank]], "tied")()
            for name, value in zip(contributed[rank], arrived, strict=True):
                parts[name].append(value)
    sums = {name: reduce(torch.add, values) for name, values in parts.items()}
    make_ready(sums.values())
    for rank in others:
        link.send_to(rank, [sums[name] for name in names], "tied")
    return sums
