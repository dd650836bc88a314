"""`nn.SyncBatchNorm`: batch norms whose statistics are those of all replicas.

Torch's own runs on accelerators alone, with collectives that a captured step cannot keep. Here the
replicas exchange mean and variance inside of stages, once per microbatch and layer.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import ConfigError
from mpxla.graph.collectives import join_replicas

__all__ = ["refuse_with_shared_statistics", "share_statistics"]


class _SharedBatchNorm(nn.SyncBatchNorm):
    """A synchronized batch norm that was given the number of replicas."""

    num_replicas: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes [samples, channels, ...] of one microbatch of this replica."""
        if not (self.training and self.num_replicas > 1):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        dims = [d for d in range(input.dim()) if d != 1]
        wide = input.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = torch.full((1,), input.numel() // input.shape[1], dtype=mean.dtype)
        own = torch.cat([mean, variance, count]).unsqueeze(0)
        means, variances, counts = join_replicas(own, self.num_replicas).split(
            [len(mean), len(mean), 1], 1
        )
        count = counts.sum(0)
        share = counts / count  # a replica may have fewer samples than others
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1).clamp_min(1)))
        shape = [1, -1, *(1 for _ in dims[1:])]
        result = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        tracked = cast(torch.Tensor, self.num_batches_tracked)
        tracked.add_(1)
        factor: Any = 1 / tracked if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running = cast(torch.Tensor, running)
            running.copy_(running + (new - running) * factor)


def share_statistics(module: nn.Module, replicas: Sequence[int]) -> None:
    """Makes synchronized batch norms use the statistics of all replicas, in place.

    Args:
        module: the model.
        replicas: ranks that hold the same tensors as this one.

    Raises:
        ConfigError: a layer names a process group of other ranks.
    """
    for path, layer in module.named_modules():
        if type(layer) is not nn.SyncBatchNorm:
            continue
        group: Any = layer.process_group
        if group is not None and dist.get_process_group_ranks(group) != list(replicas):
            raise ConfigError(
                f"the SyncBatchNorm {path} has a process_group of the ranks "
                f"{dist.get_process_group_ranks(group)}. Statistics are shared by all replicas, "
                f"the ranks {list(replicas)}: leave process_group out."
            )
        layer.__class__ = _SharedBatchNorm
        vars(layer)["num_replicas"] = len(replicas)


def refuse_with_shared_statistics(module: nn.Module) -> None:
    """Checks that replicas need not run together, before `model.join()`, in which they do not.

    Raises:
        ConfigError: a layer waits for the statistics of all of them.
    """
    layers = ((n, m) for n, m in module.named_modules() if isinstance(m, _SharedBatchNorm))
    found = next((name for name, layer in layers if layer.num_replicas > 1), None)
    if found is not None:
        raise ConfigError(
            f"model.join() does not go with the SyncBatchNorm {found}, which waits for the "
            f"statistics of all replicas. Give all replicas the same number of batches, or use a "
            f"BatchNorm."
        )
