"""Results of a step, from the ranks that compute them to all ranks of the pipeline.

A rank sends all its results in one packed message; receiving ranks wait for it only when a value
is looked at. All ranks of the pipeline take part.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from mpxla.comm.handle import Handle
from mpxla.runtime.cut import CutStep
from mpxla.runtime.link import PipelineLink

__all__ = ["exchange_results"]


def exchange_results(
    cut: CutStep,
    results: Mapping[tuple[int, int], torch.Tensor],
    microbatches: Sequence[int],
    pp_rank: int,
    link: PipelineLink,
) -> Callable[[int], list[torch.Tensor]]:
    """Sends this rank's results and expects those of the others.

    Args:
        cut: the step in stages.
        results: this rank's results by (result index, microbatch).
        microbatches: those that have run.
        pp_rank: this rank.
        link: messages between pipeline ranks.

    Returns:
        Result index -> its tensors, one per microbatch; may wait.
    """
    shown = {p.result for p in cut.step.prints if p.check is None}  # where they are
    owned = cut.owner_of_result().items()
    owner = {i: cut.placement[s] for i, s in owned if i not in shown}
    specs = cut.result_specs()
    indices = {rank: [i for i in sorted(owner) if owner[i] == rank] for rank in set(owner.values())}
    deliveries: list[Handle[None]] = []
    if pp_rank in indices:
        packed = [results[i, mb] for i in indices[pp_rank] for mb in microbatches]
        deliveries = [
            link.send_to(rank, packed, "output")
            for rank in range(cut.partition.num_ranks)
            if rank != pp_rank
        ]
    arrivals: dict[int, Callable[[], dict[int, list[torch.Tensor]]]] = {}

    def unpacked(
        indices: list[int], wait: Callable[[], list[torch.Tensor]]
    ) -> dict[int, list[torch.Tensor]]:
        flat = iter(wait())
        return {i: [next(flat) for _ in microbatches] for i in indices}

    for rank in sorted(indices):
        if rank != pp_rank:
            wanted = [specs[i] for i in indices[rank] for _ in microbatches]
            wait = link.receive_from(rank, wanted, "output")
            # Once, when the first of them is read.
            arrivals[rank] = functools.cache(functools.partial(unpacked, indices[rank], wait))

    def fetch(index: int) -> list[torch.Tensor]:
        if owner[index] == pp_rank:
            for delivery in deliveries:  # the user may change in place what is still being sent
                delivery.result()
            return [results[index, mb] for mb in microbatches]
        return arrivals[owner[index]]()[index]

    return fetch
