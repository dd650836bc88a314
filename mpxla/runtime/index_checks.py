"""Checks of a step's indices against the tables that they point into: the key `check_indices`.

The first pipeline rank owns the inputs and looks at those on the host before it announces a call.
Indices that are made inside come back as results of the step, and every rank looks at them when the
step has run. This module must not know how a graph is searched for them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from mpxla.device.backend import Backend
from mpxla.graph.indices import find_index_uses, indices_of_inputs
from mpxla.graph.stepgraph import OutputKind, StepGraph
from mpxla.runtime.signature import Signature

__all__ = ["IndexChecks"]


class IndexChecks:
    """What is checked of one captured step.

    In mode "all" the step has the results that `with_extremes` adds.
    """

    def __init__(self, mode: str, step: StepGraph, backend: Backend):
        self._backend = backend
        self._inputs = () if mode == "off" else indices_of_inputs(step)
        self._reported = () if mode != "all" else tuple(u for _, _, u in find_index_uses(step))
        results = sum(role.kind is OutputKind.RESULT for role in step.outputs)
        self._first = results - len(self._reported)

    @property
    def looks_at_inputs(self) -> bool:
        """Whether `problem_of_inputs` has something to look at."""
        return bool(self._inputs)

    def problem_of_inputs(
        self, signature: Signature, tensors: Mapping[int, Sequence[torch.Tensor]]
    ) -> str | None:
        """What is wrong with the inputs of a call, as a text for the user. First pipeline rank.

        Tensors on an accelerator are not looked at, since the host would have to wait for them.
        """
        if not self._inputs:
            return None
        # What lies on a device may have to be computed first, best all of it together.
        self._backend.adopt(
            [t for leaves in tensors.values() for t in leaves if t.device.type != "cpu"]
        )
        for check in self._inputs:
            there = {m: [leaves[i] for i in check.leaves] for m, leaves in tensors.items()}
            seen = [m for m, values in there.items() if all(map(self._is_looked_at, values))]
            found = seen and check.problem(map(self._backend.view, there[m]) for m in seen)
            if found:
                number, text = found
                path = signature.tensor_paths[check.leaves[0]]
                return (
                    f"{signature.function}: argument {path}, microbatch {seen[number]}, holds "
                    f"{text}. The step has not run. Correct the data (check_indices: False turns "
                    f"this check off)."
                )
        return None

    def _is_looked_at(self, tensor: torch.Tensor) -> bool:
        return self._backend.is_host or not self._backend.is_on_device(tensor)

    def problem_of_results(
        self, function: str, microbatches: Sequence[int], fetch: Callable[[int], list[torch.Tensor]]
    ) -> str | None:
        """What is wrong with the indices that the programs report; waits for the step.

        `fetch` gives the tensors of a result by its index; all ranks of the pipeline call it.
        """
        for place, use in enumerate(self._reported):
            extremes = fetch(self._first + place)
            for microbatch, found in zip(microbatches, extremes, strict=True):
                low, high = self._backend.view(found).tolist()
                text = use.problem(low, high)
                if text is not None:
                    return (
                        f"{function}: microbatch {microbatch} made {text}. The step has run, and "
                        f"its gradients are worthless: stop, or clear them before you go on."
                    )
        return None
