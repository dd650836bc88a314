"""What a device can do, and how long its messages take.

Devices are numbered so that those of a node follow each other. A group of devices with a stride is,
for instance, the replicas of a tensor-parallel rank. Its ring leaves a node once for all members
that it has there, so these share their network links:

    stride 1, 8 per node   0 1 2 3 4 5 6 7 | 8 ...     8 members use 8 network links
    stride 8, 8 per node   0 . . . . . . . | 8 ...     one member, one link
"""

import math
from dataclasses import dataclass

__all__ = ["DeviceModel"]


@dataclass(frozen=True)
class DeviceModel:
    """A device as a process sees it (a GPU, a TPU chip, a NeuronCore), its node and its network.

    Attributes:
        name: for people.
        devices_per_node: devices that are joined by the fast links.
        peak_flops_per_s: dense peak by dtype.
        achievable_flops_share: share of the peak that large matrix products reach.
        memory_bytes: memory of a device.
        usable_memory_share: what the runtime and fragmentation leave of it.
        memory_bytes_per_s: bandwidth of the memory.
        achievable_memory_share: share of it that elementwise programs reach.
        node_bytes_per_s: what a device sends inside its node, in one direction.
        node_latency_s: of a message there.
        network_bytes_per_s: a device's share of what its node sends to others.
        network_latency_s: of a message there.
        achievable_link_share: share of the links' bandwidth that collectives reach.
    """

    name: str
    devices_per_node: int
    peak_flops_per_s: dict[str, float]
    achievable_flops_share: float
    memory_bytes: float
    usable_memory_share: float
    memory_bytes_per_s: float
    achievable_memory_share: float
    node_bytes_per_s: float
    node_latency_s: float
    network_bytes_per_s: float
    network_latency_s: float
    achievable_link_share: float

    @property
    def usable_bytes(self) -> int:
        """Memory that a step may take."""
        return int(self.memory_bytes * self.usable_memory_share)

    def product_s(self, flops: float, dtype: str) -> float:
        """Seconds of large matrix products."""
        return flops / (self.peak_flops_per_s[dtype] * self.achievable_flops_share)

    def traffic_s(self, num_bytes: float) -> float:
        """Seconds of reading and writing memory."""
        return num_bytes / (self.memory_bytes_per_s * self.achievable_memory_share)

    def message_s(self, num_bytes: float, crosses_nodes: bool) -> float:
        """Seconds of a message between two devices."""
        bandwidth = self.network_bytes_per_s if crosses_nodes else self.node_bytes_per_s
        latency = self.network_latency_s if crosses_nodes else self.node_latency_s
        return latency + num_bytes / (bandwidth * self.achievable_link_share)

    def reduce_scatter_s(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of a reduce-scatter, or of an all-gather, which moves as much.

        Every device has `num_bytes` of the whole; `stride` is the distance of neighbours in the
        group.
        """
        if size == 1:
            return 0.0
        bandwidth, latency = self.node_bytes_per_s, self.node_latency_s
        if size * stride > self.devices_per_node:
            members = min(size, max(1, self.devices_per_node // stride))
            bandwidth = min(bandwidth, members * self.network_bytes_per_s)
            latency = self.network_latency_s
        share = (size - 1) / size
        moved_s = share * num_bytes / (bandwidth * self.achievable_link_share)
        return moved_s + latency * math.ceil(math.log2(size))

    def all_reduce_s(self, num_bytes: float, size: int) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.reduce_scatter_s(num_bytes, size)
