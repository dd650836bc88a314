"""Gradients of a plain `loss.backward()`, outside step functions, over replicas.

With one stage a script may call the model and differentiate as it always did. Autograd tells when a
parameter has its gradient; when the whole backward is over, all of them are reduced as those of a
step function are.
"""

import weakref

import torch
from torch import nn

from mpxla.device.backend import Buffer
from mpxla.parallel.gradients.bucketed import BucketedReduction, GradientFlow
from mpxla.parallel.gradients.combined import CombinedReduction
from mpxla.parallel.gradients.in_scripts import own_gradient
from mpxla.parallel.gradients.reducer import GradientReducer
from mpxla.parallel.store import set_gradients

__all__ = ["PlainBackward"]

# What torch's own DDP uses to learn that a backward is over.
_engine = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]


class PlainBackward:
    """Reduces after every backward that autograd runs on the model's placed parameters."""

    def __init__(self, reducer: GradientReducer):
        self._reducer = reducer
        self._state = reducer.replica.state
        self._touched: set[str] = set()
        self._reductions: dict[tuple[tuple[str, ...], ...], CombinedReduction] = {}
        self._watched: set[str] = set()
        self.watch()

    def watch(self) -> None:
        """Called before every forward: parameters may be trained that were frozen before."""
        for name, parameter in self._state.local_parameters():
            if parameter.requires_grad and name not in self._watched:
                self._watched.add(name)
                parameter.register_post_accumulate_grad_hook(_Note(self, name))

    def note(self, name: str) -> None:
        """Notes that a parameter has got its gradient."""
        if not self._touched:
            _engine.queue_callback(self._reduce)
        self._touched.add(name)

    def _reduce(self) -> None:
        names = tuple(n for n, _ in self._state.local_parameters() if n in self._touched)
        self._touched.clear()
        parameters = [self._state.parameters[name] for name in names]
        # Also the loss: an update in place would take the parameters' memory from it.
        self._reducer.replica.backend.flush()
        gradients = [g for p in parameters if (g := own_gradient(p)) is not None]
        set_gradients(parameters, [None] * len(parameters))
        buffers = tuple(sorted(self._state.buffers))
        reduction = self._reductions.get((names, buffers))
        if reduction is None:
            sources = {name: [(0, place)] for place, name in enumerate(names)}
            flow = GradientFlow(sources, frozenset(names), {}, buffers)
            self._reducer.prepare_updates(names)
            part = BucketedReduction(self._reducer, flow)
            reduction = CombinedReduction(self._reducer.rounds, [part])
            self._reductions[names, buffers] = reduction
        reduction.begin()
        if self._state.gradient_shards and not self._reducer.rounds.is_same():
            reduction.joined()  # raises, before gradients are divided
        gradients = self._reducer.replica.backend.adopt(gradients)
        gradients = [self._scattered(n, g) for n, g in zip(names, gradients, strict=True)]
        reduction.start(0, {0: gradients})
        reduction.finish({0: gradients})

    def _scattered(self, name: str, gradient: Buffer) -> Buffer:
        """The mean of this rank's part, where gradients are divided (`shard_gradients`)."""
        shard, replica = self._state.gradient_shards.get(name), self._reducer.replica
        if shard is None:
            return gradient
        (value,) = replica.backend.get([gradient])
        value = value.to(replica.store.gradient_spec(name).dtype).reshape(-1)
        missing = shard.length * shard.size - value.numel()
        parts = torch.nn.functional.pad(value, (0, missing)).view(shard.size, -1)
        part = replica.transport.reduce_scatter(parts, replica.group).result()
        (buffer,) = replica.backend.put([part[: shard.num_own] / shard.size])
        return buffer


class _Note:
    """A hook that does not keep its owner alive.

    The garbage collector does not see through autograd: a parameter whose hook held the model's
    state, parameters included, would stay for ever.
    """

    is_internal = True
    """Others are the user's (`graph/capture/gradient_hooks.py`)."""

    def __init__(self, owner: PlainBackward, name: str):
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, _parameter: nn.Parameter) -> None:
        if (owner := self._owner()) is not None:
            owner.note(self._name)
