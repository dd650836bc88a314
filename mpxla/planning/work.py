"""Seconds of the parts of a step on one device, in the words of the simulator.

A part is products at the achievable share of the peak, elementwise programs at the achievable share
of the memory's bandwidth, and the messages of tensor parallelism, one after another. Replicas
exchange gradients when the last backward of a stage has ended, and then the stage is updated: the
simulator's reduction stands for both.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpxla.planning.device import DeviceModel
from mpxla.planning.layout import PRECISIONS, Layout
from mpxla.planning.memory import (
    device_layer_weights,
    device_parameters,
    fixed_bytes,
    kept_bytes,
    saved_bytes,
    spread_layers,
)
from mpxla.planning.transformer import Transformer
from mpxla.schedule.analysis import StageBytes
from mpxla.schedule.dataflow import Edge
from mpxla.schedule.search import StepCosts
from mpxla.schedule.simulate import Costs

__all__ = ["Part", "Work", "step_costs"]

_FLASH_BACKWARD = 2.5
"""Five products for the two of the forward: the scores are computed again."""


class Part(NamedTuple):
    """Seconds of a layer, or of what surrounds the layers, for one microbatch.

    Attributes:
        forward_s: of the forward.
        input_gradient_s: of what other stages wait for, with what is computed again.
        weight_gradient_s: of the rest of the backward.
    """

    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a device does for one microbatch and once per step."""

    model: Transformer
    layout: Layout
    device: DeviceModel

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Parameters of every stage on a device."""
        return device_parameters(self.model, self.layout)

    @cached_property
    def layer(self) -> Part:
        """A transformer layer."""
        tokens = self._tokens
        product_s = self._product_s(2 * tokens * device_layer_weights(self.model, self._tensor))
        attention_s = self._product_s(tokens * self.model.attention_flops / self._tensor)
        if self.model.flash_attention:
            attention_s /= 2
        memory_s = self.device.traffic_s(self._layer_traffic + self._scores_traffic)
        exchange_s = 2 * self._all_reduce_s
        forward_s = product_s + attention_s + memory_s + exchange_s
        again_s = {
            "none": 0.0,
            "selective": attention_s + self.device.traffic_s(self._scores_traffic),
            "full": forward_s,
        }[self.layout.recompute]
        factor = _FLASH_BACKWARD if self.model.flash_attention else 2.0
        gradient_s = product_s + factor * attention_s + 2 * memory_s + exchange_s
        return Part(forward_s, gradient_s + again_s, product_s)

    @cached_property
    def embedding(self) -> Part:
        """Before the first layer: a look-up, and its sum over the parts of the table."""
        look_up_s = self.device.traffic_s(2 * self._residual_bytes)
        return Part(look_up_s + self._all_reduce_s, look_up_s, 0.0)

    @cached_property
    def head(self) -> Part:
        """Behind the last layer: logits and the loss, which reads and writes them in fp32."""
        weights = self.model.head_weights / self._tensor
        product_s = self._product_s(2 * self._tokens * weights)
        logits = self._tokens * self.model.vocab / self._tensor
        loss_s = self.device.traffic_s(12 * logits)
        return Part(product_s + loss_s, product_s + loss_s + self._all_reduce_s, product_s)

    @cached_property
    def stages(self) -> tuple[Part, ...]:
        """Every stage: its layers, with the embedding on the first and the head on the last."""
        counts = spread_layers(self.model, self.layout.num_stages)
        last = len(counts) - 1
        return tuple(
            _sum(count, self.layer, [self.embedding] * (stage == 0) + [self.head] * (stage == last))
            for stage, count in enumerate(counts)
        )

    def exchange_s(self, stage: int) -> float:
        """Seconds of the replicas' gradients, and of the tied table between its two stages."""
        bytes_of, layout = PRECISIONS[self.layout.precision], self.layout
        count = self.parameters[stage]
        group = layout.data, layout.tensor
        gradients_s = self.device.reduce_scatter_s(count * bytes_of.gradient, *group)
        rest = bytes_of.weight if layout.shard_optimizer_state else bytes_of.gradient
        gathering_s = self.device.reduce_scatter_s(count * rest, *group)
        last = layout.num_stages - 1
        tied_s = 0.0
        if self.model.tied_embeddings and last and stage in (0, last):
            table = self.model.head_weights / layout.tensor * bytes_of.gradient
            home = layout.placement
            if home[0] != home[last]:
                tied_s = self.device.message_s(table, self.crosses_nodes(home[0], home[last]))
        return gradients_s + gathering_s + tied_s

    def update_s(self, stage: int) -> float:
        """Seconds of the optimizer: state in and out, gradients in, weights out."""
        bytes_of, layout = PRECISIONS[self.layout.precision], self.layout
        own = layout.data if layout.shard_optimizer_state else 1
        each = 2 * bytes_of.state + bytes_of.gradient + bytes_of.weight
        return self.device.traffic_s(self.parameters[stage] * each / own)

    def transfer_s(self, source: int, target: int) -> float:
        """Seconds of a microbatch from one pipeline rank to another; each device sends its part."""
        share = self._residual_bytes / self._tensor
        return self.device.message_s(share, self.crosses_nodes(source, target))

    def crosses_nodes(self, source: int, target: int) -> bool:
        """Whether some device of a pipeline rank has its partner of another on another node."""
        stride, per_node = self.layout.tensor * self.layout.data, self.device.devices_per_node
        offsets = (0, stride - 1)
        return any(
            (source * stride + o) // per_node != (target * stride + o) // per_node for o in offsets
        )

    @property
    def _tensor(self) -> int:
        return self.layout.tensor

    @property
    def _tokens(self) -> int:
        return self.layout.microbatch_size * self.model.sequence_length

    @property
    def _each(self) -> int:
        return PRECISIONS[self.layout.precision].activation

    @property
    def _residual_bytes(self) -> int:
        return self._tokens * self.model.hidden * self._each

    @property
    def _all_reduce_s(self) -> float:
        """Of one residual stream; sequence parallelism moves as much in two halves."""
        return self.device.all_reduce_s(self._residual_bytes, self._tensor)

    @property
    def _layer_traffic(self) -> float:
        """Bytes that norms, additions, dropouts and the activation read and write in a forward."""
        model, each = self.model, self._each
        # Two norms (in, out), two additions (two in, one out), two masks.
        whole = model.hidden * (2 * 2 * each + 2 * 3 * each + 2 * model.dropout)
        split = (2 + model.gated_ffn) * each * model.ffn / self._tensor
        shares = self._tensor if self.layout.sequence_parallel else 1
        return self._tokens * (whole / shares + split)

    @property
    def _scores_traffic(self) -> float:
        """Scores are written, read and written by softmax and by dropout, and read."""
        if self.model.flash_attention:
            return 0.0
        per_score = 4 * self._each + (2 * self._each + 1) * self.model.dropout
        scores = self._tokens * self.model.sequence_length * self.model.heads / self._tensor
        return scores * per_score

    def _product_s(self, flops: float) -> float:
        return self.device.product_s(flops, PRECISIONS[self.layout.precision].dtype)


def step_costs(work: Work) -> StepCosts:
    """What a step takes and keeps, for the search over schedules."""
    model, layout = work.model, work.layout
    placement, stages = layout.placement, work.stages
    forward = frozenset((s, s + 1) for s in range(len(stages) - 1))
    backward = frozenset((t, s) for s, t in forward)
    transfer: dict[Edge, float] = {
        (a, b): work.transfer_s(placement[a], placement[b]) for a, b in forward | backward
    }
    costs = Costs(
        forward=[part.forward_s for part in stages],
        backward=[part.input_gradient_s + part.weight_gradient_s for part in stages],
        transfer=transfer,
        reduce=[work.exchange_s(s) + work.update_s(s) for s in range(len(stages))],
        input_gradient=[part.input_gradient_s for part in stages],
        weight_gradient=[part.weight_gradient_s for part in stages],
    )
    saved, kept = saved_bytes(model, layout), kept_bytes(model, layout)
    held = [StageBytes(one, two, two) for one, two in zip(saved, kept, strict=True)]
    return StepCosts(costs, forward, backward, held, tuple(map(round, fixed_bytes(model, layout))))


def _sum(count: int, layer: Part, ends: list[Part]) -> Part:
    return Part(*(count * own + sum(rest) for own, *rest in zip(layer, *ends, strict=True)))
