"""Gradients as flat tensors: which travel together; programs that pack, cut and add gradients.

A bucket holds gradients of one dtype that are complete at the same time and held by the same
pipeline ranks:

    | a ------ | b --- | c -- | pad |      pad: to a multiple of the number of replicas, if sharded

Packing is one compiled program per bucket, so that starting a reduction traces nothing and waits
for nothing; sums and parts are small programs, compiled at first use. Gradients are buffers of the
backend here: nothing computes with them but programs. This file knows neither transports nor
optimizers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from math import prod

import torch

from mpxla.device.backend import Backend, Buffer, Executable
from mpxla.parallel.programs import Programs
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec

__all__ = ["Bucket", "Packer", "cut_gradients", "fill_buckets", "sum_gradients"]

Cut = tuple[int, tuple[int, ...]]
"""First element of a part in a flat tensor, and the part's shape."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype in a flat tensor.

    Attributes:
        names: what it holds, in order.
        specs: their shapes and dtype.
        holders: pipeline ranks that hold them.
        parts: its length is a multiple of this.
    """

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    holders: tuple[int, ...]
    parts: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of all elements."""
        return self.specs[0].dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every tensor."""
        return tuple(prod(spec.shape) for spec in self.specs)

    @property
    def num_elements(self) -> int:
        """Elements of the flat tensor, padding included."""
        return -(-sum(self.sizes) // self.parts) * self.parts

    @property
    def cuts(self) -> list[Cut]:
        """First element of every tensor in the flat one, and its shape."""
        ends = accumulate(self.sizes, initial=0)
        return [(start, spec.shape) for start, spec in zip(ends, self.specs, strict=False)]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat host tensor [num_elements], by name."""
        cuts = zip(self.names, self.cuts, self.sizes, strict=True)
        return {name: flat[at : at + size].view(shape) for name, (at, shape), size in cuts}


def fill_buckets(
    specs: Mapping[str, TensorSpec],
    holders: tuple[int, ...],
    capacity_bytes: int,
    parts: int = 1,
) -> list[Bucket]:
    """Groups tensors into buckets of one dtype that hold at most `capacity_bytes` (or one tensor).

    Every rank passes equal tensors in equal order.
    """
    groups: list[list[str]] = []
    open_groups: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, spec in specs.items():
        names, filled = open_groups.get(spec.dtype, ([], 0))
        if not names or filled + spec.num_bytes > capacity_bytes:
            names, filled = [], 0
            groups.append(names)
        names.append(name)
        open_groups[spec.dtype] = (names, filled + spec.num_bytes)
    return [
        Bucket(tuple(names), tuple(specs[name] for name in names), holders, parts)
        for names in groups
    ]


def _concatenated(
    bucket: Bucket,
    present: Sequence[str],
    dtype: torch.dtype,
    shape: Sequence[int],
    scale: torch.Tensor,
    *tensors: torch.Tensor,
) -> list[torch.Tensor]:
    """Tensors to one scaled flat tensor; zeros where a name of the bucket has none."""
    given = dict(zip(present, tensors, strict=True))
    pieces: list[torch.Tensor] = []
    gap = 0
    for name, size in zip(bucket.names, bucket.sizes, strict=True):
        if name in given:
            pieces += [scale.new_zeros(gap, dtype=bucket.dtype)] if gap else []
            pieces.append(given[name].reshape(-1))
        gap = 0 if name in given else gap + size
    gap += bucket.num_elements - sum(bucket.sizes)
    pieces += [scale.new_zeros(gap, dtype=bucket.dtype)] if gap else []
    return [(torch.cat(pieces) * scale).to(dtype).view(*shape)]


class Packer:
    """The compiled program that packs a bucket. Tensors that are not present count as zeros."""

    def __init__(
        self,
        bucket: Bucket,
        present: Sequence[str],
        dtype: torch.dtype,
        backend: Backend,
        shape: Sequence[int] = (-1,),
    ):
        spec_of = dict(zip(bucket.names, bucket.specs, strict=True))
        is_double = bucket.dtype == torch.float64
        self._dtype = torch.float64 if is_double else torch.float32
        specs = [TensorSpec((), self._dtype), *(spec_of[name] for name in present)]
        function = partial(_concatenated, bucket, tuple(present), dtype, tuple(shape))
        name = f"bucket of {present[0]}"
        self._program: Executable = compile_function(backend, name, function, specs)
        self._backend = backend
        self._scales: dict[float, torch.Tensor] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Starts packing the tensors, times `scale`; the result is still being computed."""
        if scale not in self._scales:
            (self._scales[scale],) = self._backend.put([torch.tensor(scale, dtype=self._dtype)])
        (flat,) = self._program([self._scales[scale], *tensors])
        return flat


def _sums(
    counts: Sequence[int], factor: float, dtypes: Sequence[torch.dtype], *terms: torch.Tensor
) -> list[torch.Tensor]:
    """Groups of terms, one after the other, to the sum of each group, every term scaled."""
    rest, sums = iter(terms), []
    for count, dtype in zip(counts, dtypes, strict=True):
        group = [next(rest).to(dtype) for _ in range(count)]
        scaled = group if factor == 1.0 else [term * factor for term in group]
        sums.append(reduce(torch.add, scaled))
    return sums


def _parts(cuts: Sequence[Cut], dtype: torch.dtype, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, seen as flat, to parts of it."""
    # Each part is a tensor of its own, also one that is the whole.
    return [part.clone() for part in _cut(tensor, cuts, dtype)]


def _cut(tensor: torch.Tensor, cuts: Sequence[Cut], dtype: torch.dtype) -> list[torch.Tensor]:
    flat = tensor.reshape(-1).to(dtype)
    return [flat[start : start + prod(shape)].view(shape) for start, shape in cuts]


def sum_gradients(
    programs: Programs,
    groups: Sequence[Sequence[Buffer]],
    dtypes: Sequence[torch.dtype],
    factor: float = 1.0,
) -> list[Buffer]:
    """The sum of each group of buffers, each times a factor; started, not waited for.

    Narrower terms are widened before they are added. The last term of a group is spent: the sum may
    take its memory.
    """
    spec = programs.backend.spec
    results = [group[0] for group in groups]
    computed = [
        i
        for i, (group, dtype) in enumerate(zip(groups, dtypes, strict=True))
        if len(group) > 1 or factor != 1.0 or spec(group[0]).dtype != dtype
    ]
    if not computed:
        return results
    counts = tuple(len(groups[i]) for i in computed)
    terms = [term for i in computed for term in groups[i]]
    settings = (counts, factor, tuple(dtypes[i] for i in computed))
    ends = (end - 1 for end in accumulate(counts))
    spent = [e for e, i in zip(ends, computed, strict=True) if spec(terms[e]).dtype == dtypes[i]]
    totals = programs.run("sums of gradients", _sums, settings, terms, spent)
    for index, total in zip(computed, totals, strict=True):
        results[index] = total
    return results


def cut_gradients(
    programs: Programs, value: torch.Tensor | Buffer, cuts: Sequence[Cut], dtype: torch.dtype
) -> list[Buffer]:
    """Parts of a tensor on the host or of a buffer, on the device; elements count in order."""
    if not cuts:
        return []
    if isinstance(value, torch.Tensor) and value.is_cpu:
        return programs.backend.put(_cut(value, cuts, dtype))
    settings = (tuple(cuts), dtype)
    return programs.run("parts of gradients", _parts, settings, [value])
