"""Communication of gradients by the user's own function, as `register_comm_hook` of torch's DDP.

A thread of its own reads a bucket back from the device and calls the hook, one bucket after the
other in the order that all replicas have in common. This file does not know when buckets start.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.comm.handle import Handle
from mpxla.comm.transport import Transport
from mpxla.comm.worker import Worker
from mpxla.device.backend import Backend, Buffer
from mpxla.errors import MpxlaError
from mpxla.parallel.gradients.buckets import Bucket

__all__ = ["CommHook", "GradBucket"]


class GradBucket:
    """What a hook gets: one bucket of this rank's gradients, with the methods of torch's own.

    Tensors are on the host, so that hooks can hand them to gloo. They are sums over the
    microbatches of this replica.
    """

    def __init__(
        self,
        bucket: Bucket,
        flat: torch.Tensor,
        index: int,
        is_last: bool,
        parameters: Sequence[torch.Tensor],
    ):
        self._bucket = bucket
        self._flat = flat
        self._index = index
        self._is_last = is_last
        self._parameters = list(parameters)

    def index(self) -> int:
        """Position of the bucket in the order of reduction."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat [num_elements]."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat tensor."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the flat tensor in the parameters' shapes."""
        return list(self._bucket.split(self._flat).values())

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`; on the device."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no bucket follows in this step."""
        return self._is_last


class CommHook:
    """Calls a user's hook for every bucket, see `DistributedModel.register_comm_hook`.

    All models share the thread: collectives of two hooks must have one order on all replicas.
    """

    def __init__(
        self,
        state: Any,
        hook: Callable[[Any, Any], Any],
        transport: Transport,
        thread: Worker,
        backend: Backend,
    ):
        self._state = state
        self._hook = hook
        self._name = getattr(hook, "__qualname__", type(hook).__name__)
        self._watch = transport.watch
        self._thread = thread
        self._backend = backend

    def submit(
        self,
        bucket: Bucket,
        flat: Buffer,
        index: int,
        is_last: bool,
        parameters: Sequence[torch.Tensor],
    ) -> Handle[torch.Tensor]:
        """Queues a bucket, whose gradients may still be under way; returns at once.

        Returns:
            Handle of what the hook's future holds: a host tensor like `flat`.
        """
        handle: Handle[torch.Tensor] = Handle(self._watch, f"the comm hook {self._name}")

        def answer() -> None:
            try:
                (found,) = self._backend.get([flat])
                given = GradBucket(bucket, found, index, is_last, parameters)
                handle.set_result(self._reduced(given))
            except Exception as error:  # the user's code may raise anything
                handle.set_error(error)

        self._thread.put(answer)
        return handle

    def _reduced(self, bucket: GradBucket) -> torch.Tensor:
        flat = bucket.buffer()
        future = self._hook(self._state, bucket)
        if not callable(getattr(future, "wait", None)):  # futures of collectives have other classes
            raise MpxlaError(
                f"the comm hook {self._name} returned a {type(future).__name__}; it has to return "
                f"a torch.futures.Future of the reduced bucket.buffer()."
            )
        result = future.wait()
        is_alike = isinstance(result, torch.Tensor) and result.numel() == flat.numel()
        if not is_alike or result.device.type != "cpu":
            raise MpxlaError(
                f"the future of the comm hook {self._name} holds {_describe(result)}; it has to "
                f"hold a host tensor of {flat.numel()} elements, like bucket.buffer()."
            )
        return result.reshape(-1).to(flat.dtype)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"
