"""Rows of embeddings that a step has scaled (`max_norm`) are written back when it has run.

Every rank that holds a table writes the rows that any microbatch of any replica has read, as one
process would that reads the whole batch. An evaluation step, which replicas need not call together,
writes those of its own batch where there is one replica, and none where there are more.
"""

from collections.abc import Callable

import torch

from mpxla.comm.objects import Objects
from mpxla.comm.transport import Group
from mpxla.device.backend import Backend
from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import StepGraph
from mpxla.log import warn_once
from mpxla.runtime.states import ModelStates

__all__ = ["ScaledRows"]


class ScaledRows:
    """Those of one captured step.

    Args:
        step: the step.
        states: parameters of all models.
        backend: gives values on the host.
        objects: between replicas.
        replicas: ranks that have the same parameters.
    """

    def __init__(
        self,
        step: StepGraph,
        states: ModelStates,
        backend: Backend,
        objects: Objects,
        replicas: Group,
    ):
        self._results = step.scaled_tables
        self._states, self._backend = states, backend
        self._objects, self._replicas = objects, replicas
        self._writes = step.is_training or len(replicas) == 1
        divided = sorted(name for name in self._results if name in states.shards)
        if divided:
            raise CaptureError(
                f"the step scales rows of {divided[0]} in place (nn.Embedding(max_norm=...)), "
                f"whose values are divided over ranks (sharded_data_parallel_degree). Leave "
                f"max_norm out, or keep the table whole: a larger sdp_param_persistence_threshold."
            )
        for name in self._results:
            warn_once(
                f"max_norm of {name}",
                f"{name} has a max_norm: every step call waits for its programs, to write the rows "
                f"that it has scaled.",
            )

    def write(self, fetch: Callable[[int], list[torch.Tensor]]) -> None:
        """Scales the rows on this rank; all ranks call it after the step, training or not.

        Args:
            fetch: result index -> its tensors, one per microbatch.
        """
        if not (self._results and self._writes):
            return
        found = {
            name: torch.stack([self._backend.view(t) for t in fetch(index)]).amin(0)
            for name, index in self._results.items()
        }
        everyone = [found]
        if len(self._replicas) > 1:
            everyone = self._objects.allgather(found, self._replicas)
        for name in found:
            scale = torch.stack([one[name] for one in everyone]).amin(0)
            label, own = self._states.own_name(name)
            parameter = self._states[label].parameters[own]
            if not parameter.is_meta and bool((scale < 1).any()):
                with torch.no_grad():
                    parameter.mul_(scale.to(parameter.device))
