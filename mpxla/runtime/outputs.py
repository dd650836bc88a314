"""What a step call returns: `StepOutput`, and how results reach every rank of a pipeline.

The rank that computes results sends them to the other pipeline ranks in one packed message at the
end of the step; a receiving rank waits for it only when a value is looked at.

Reductions over microbatches are PyTorch's own on what users see, as if users had written them: one
operator on a few small values, for which a program would be compiled per shape and number. On the
CPU and on CUDA the tensors of jax are ordinary ones; lazy ones of torch_xla are started at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.errors import StepError
from mpxla.graph.python.left_numbers import RecordRead
from mpxla.graph.python.recorded import Recorded
from mpxla.graph.stepgraph import ResultLeaf, StepGraph

__all__ = ["Part", "StepOutput", "build_outputs", "differ_in_form", "leave_numbers"]


class StepOutput:
    """All microbatches' versions of one tensor that a step function returned.

    The tensors are detached and live on the rank's device. Shapes below are those of one
    microbatch. (SMP API reference, "StepOutput".)
    """

    def __init__(
        self, fetch: Callable[[], list[torch.Tensor]], start: Callable[[list[torch.Tensor]], Any]
    ):
        self._fetch: Callable[[], list[torch.Tensor]] | None = fetch
        self._start = start
        self._outputs: list[torch.Tensor] | None = None

    @property
    def outputs(self) -> list[torch.Tensor]:
        """One tensor per microbatch, in order."""
        fetch = self._fetch
        if fetch is not None:
            self._outputs = fetch()
            self._fetch = None  # it holds the buffers that the tensors were made of
        assert self._outputs is not None, "they were fetched before"
        return self._outputs

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, of the shape of one microbatch's tensor; of integers in float."""
        stacked = torch.stack(self.outputs)
        if not (stacked.is_floating_point() or stacked.is_complex()):
            stacked = stacked.to(torch.get_default_dtype())
        return self._started(stacked.mean(dim=0))

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches, of the shape of one microbatch's tensor."""
        return self._started(torch.stack(self.outputs).sum(dim=0))

    def concat(self) -> torch.Tensor:
        """Concatenation along axis 0: the tensor of the whole batch.

        Raises:
            StepError: the step function returned a scalar, which has no axis.
        """
        if self.outputs[0].dim() == 0:
            raise StepError(
                "StepOutput.concat: the step function returned a scalar, which has no batch axis. "
                "Use stack(), reduce_mean() or reduce_sum()."
            )
        return self._started(torch.cat(self.outputs, dim=0))

    def stack(self) -> torch.Tensor:
        """Stack of shape [num_microbatches, ...]."""
        return self._started(torch.stack(self.outputs, dim=0))

    def _started(self, value: torch.Tensor) -> torch.Tensor:
        """Starts the computation now: pending values would join later programs."""
        self._start([value])
        return value

    def __repr__(self) -> str:
        if self._outputs is None:
            return "StepOutput(not read yet)"
        first = self._outputs[0]
        return f"StepOutput({len(self._outputs)} x {first.dtype}{list(first.shape)})"


@dataclass(frozen=True)
class Part:
    """Results of the microbatches that went one way through a step function.

    Attributes:
        leaves: the returned leaves.
        structure: their pytree structure.
        microbatches: their numbers in the call.
        results: by their index; each gives its tensors, one per microbatch, and may wait.
        records: places in Python that get numbers of the model.
        numbers: indices of the results that these are computed of.
    """

    leaves: Sequence[ResultLeaf]
    structure: Any
    microbatches: Sequence[int]
    results: Mapping[int, Callable[[], list[torch.Tensor]]]
    records: Sequence[RecordRead] = ()
    numbers: Sequence[int] = ()


def build_outputs(
    parts: Sequence[Part],
    own: slice,
    publish: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    start: Callable[[list[torch.Tensor]], Any],
) -> Any:
    """Puts results of the microbatches `own` in the structure that the step function returned.

    `differ_in_form` has found nothing. `publish` gives tensors to the user, `start` starts what is
    pending of them.

    Returns:
        The structure with a `StepOutput` for every tensor, a list over microbatches for every
        Python number, and all other leaves as they were.
    """
    wanted = range(sum(len(part.microbatches) for part in parts))[own]

    def later(place: int) -> Callable[[], list[Any]]:
        """Gives a leaf's tensors or numbers, one per microbatch; holds nothing of other leaves."""
        taken: list[tuple[ResultLeaf, Sequence[int], Sequence[Any]]] = []
        for part in parts:
            leaf = part.leaves[place]
            if isinstance(leaf.value, Recorded):
                of = [part.numbers[i] for i in leaf.value.places]
            else:
                of = [] if leaf.output is None else [leaf.output]
            taken.append((leaf, part.microbatches, [part.results[i] for i in of]))

        def in_order() -> list[Any]:
            found: dict[int, Any] = {}
            for leaf, microbatches, results in taken:
                asked = [i for i, number in enumerate(microbatches) if number in wanted]
                fetched = [result() for result in results]
                columns = [publish([tensors[i] for i in asked]) for tensors in fetched]
                if isinstance(leaf.value, Recorded):
                    found_at = dict(zip(leaf.value.places, columns, strict=True))
                    rows = [{i: at[n] for i, at in found_at.items()} for n in range(len(asked))]
                    values = [leaf.value.of(row, {}) for row in rows]
                elif columns:
                    values = [t.item() if leaf.is_number else t for t in columns[0]]
                else:
                    values = [leaf.value] * len(asked)
                found.update(zip((microbatches[i] for i in asked), values, strict=True))
            return [found[number] for number in wanted]

        return in_order

    def value_of(place: int, leaf: ResultLeaf) -> Any:
        if leaf.is_number:
            return later(place)()
        if leaf.output is None:
            return leaf.value
        return StepOutput(later(place), start)

    values = [value_of(place, leaf) for place, leaf in enumerate(parts[0].leaves)]
    return pytree.tree_unflatten(values, parts[0].structure)


def leave_numbers(
    parts: Sequence[Part], publish: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    """Gives places in Python what all microbatches leave there (`graph/python/recorded.py`).

    Also those of other ranks of a tensor-parallel group, which are counted, too.
    """
    turns: list[tuple[int, Part, list[Any]]] = []
    for part in (part for part in parts if part.records):
        columns = [publish(part.results[i]()) for i in part.numbers]
        rows = zip(*columns, strict=True) if columns else ([] for _ in part.microbatches)
        turns += ((n, part, list(row)) for n, row in zip(part.microbatches, rows, strict=True))
    reads = {read.name: read for _, part, _ in turns for read in part.records}
    left = {name: read.now() for name, read in reads.items()}
    for _, part, results in sorted(turns, key=lambda turn: turn[0]):
        after = {read.name: read.after(results, left) for read in part.records}
        for name, value in after.items():
            if reads[name].is_more:
                left[name].extend(value)
            else:
                left[name] = value
    for name, read in reads.items():
        read.leave(left[name])


def differ_in_form(steps: Sequence[StepGraph]) -> str | None:
    """In which forms steps return what has to come together; None if all have one form."""
    first = steps[0]
    for other in steps[1:]:
        if other.result_spec != first.result_spec:
            forms = (_form(step) for step in (first, other))
            return "{} one way and {} the other".format(*forms)
        for a, b in zip(first.result_leaves, other.result_leaves, strict=True):
            if a.is_number and b.is_number:
                continue
            kinds = [_kind(leaf) for leaf in (a, b)]
            if kinds[0] != kinds[1]:
                return "{} one way and {} the other".format(*kinds)
    return None


def _form(step: StepGraph) -> str:
    leaves = [_kind(leaf) for leaf in step.result_leaves]
    return str(pytree.tree_unflatten(leaves, step.result_spec)).replace("'", "")


def _kind(leaf: ResultLeaf) -> str:
    if leaf.is_number:
        return "a number"
    return repr(leaf.value) if leaf.output is None else "a tensor"
