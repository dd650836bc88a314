"""How a step is spread over devices."""

from dataclasses import dataclass

from mpxla.planning.transformer import Transformer
from mpxla.schedule.placement import place_stages
from mpxla.schedule.search import Candidate

__all__ = ["PRECISIONS", "RECOMPUTATIONS", "Layout", "Precision", "problems"]

RECOMPUTATIONS = ("none", "selective", "full")
"""What a backward computes again: nothing, the scores of attention, or all of every layer."""


@dataclass(frozen=True)
class Precision:
    """Bytes per element of what a step holds.

    Attributes:
        dtype: of products.
        activation: bytes of an activation.
        weight: bytes of a weight as products read it.
        gradient: bytes of a gradient, which is also what replicas exchange.
        state: bytes of optimizer state per parameter; Adam's moments, and a master copy if mixed.
    """

    dtype: str
    activation: int
    weight: int
    gradient: int
    state: int


PRECISIONS = {
    "mixed": Precision("bf16", activation=2, weight=2, gradient=4, state=12),
    "fp32": Precision("fp32", activation=4, weight=4, gradient=4, state=8),
}


@dataclass(frozen=True)
class Layout:
    """One way to run a step.

    Attributes:
        stages: pipeline ranks.
        tensor: devices that share every layer.
        data: replicas.
        microbatch_size: sequences of a microbatch on one replica.
        pipeline: name of the schedule.
        stages_per_rank: virtual stages.
        recompute: one of `RECOMPUTATIONS`.
        shard_optimizer_state: replicas divide the optimizer state among them.
        sequence_parallel: tensor-parallel devices also divide norms and dropouts, by positions.
        precision: one of `PRECISIONS`.
        active_microbatches: most microbatches in flight at a stage; None: what the schedule needs.
    """

    stages: int = 1
    tensor: int = 1
    data: int = 1
    microbatch_size: int = 1
    pipeline: str = "interleaved"
    stages_per_rank: int = 1
    recompute: str = "none"
    shard_optimizer_state: bool = False
    sequence_parallel: bool = False
    precision: str = "mixed"
    active_microbatches: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.stages} x {self.tensor} x {self.data}", self.pipeline]
        parts.append(f"{self.stages_per_rank} per rank")
        parts.append(f"microbatch {self.microbatch_size}")
        parts.append(f"recompute {self.recompute}")
        parts.append("sharded state" if self.shard_optimizer_state else "whole state")
        return ", ".join(parts)

    @property
    def devices(self) -> int:
        """Devices that take part."""
        return self.stages * self.tensor * self.data

    @property
    def num_stages(self) -> int:
        """Stages of all pipeline ranks."""
        return self.stages * self.stages_per_rank

    @property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        return place_stages(self.pipeline, self.stages, self.stages_per_rank)

    def num_microbatches(self, model: Transformer) -> int:
        """Microbatches of a step, in every replica."""
        return model.global_batch // (self.data * self.microbatch_size)

    def candidate(self, num_microbatches: int) -> Candidate:
        """The pipeline's part of the layout, for so many microbatches."""
        enough = num_microbatches if self.pipeline == "simple" else 2 * self.stages
        limit = self.active_microbatches or enough
        active = min(limit, num_microbatches)
        return Candidate(self.pipeline, self.stages_per_rank, num_microbatches, active)


def problems(layout: Layout, model: Transformer) -> list[str]:
    """Why a model cannot be spread like this; empty if it can."""
    found: list[str] = []
    tensor = layout.tensor
    if model.heads % tensor:
        found.append(
            f"{model.heads} heads cannot be divided among {tensor} tensor-parallel devices"
        )
    if model.kv_heads % tensor and tensor % model.kv_heads:
        found.append(
            f"{model.kv_heads} key-value heads can be neither divided among nor repeated on "
            f"{tensor} tensor-parallel devices"
        )
    if model.ffn % tensor:
        found.append(f"ffn {model.ffn} cannot be divided among {tensor} tensor-parallel devices")
    if layout.num_stages > model.layers:
        found.append(f"{layout.num_stages} stages are more than the {model.layers} layers")
    if model.global_batch % (layout.data * layout.microbatch_size):
        found.append(
            f"a global batch of {model.global_batch} cannot be divided into microbatches of "
            f"{layout.microbatch_size} on {layout.data} replicas"
        )
    return found
