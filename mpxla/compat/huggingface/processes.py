"""accelerate's idea of the processes: its processes are the replicas of the model.

`Trainer` feeds, counts and gathers through accelerate. The ranks of one pipeline are one process to
it: they read the same batches. Only the main process is one rank, since it writes.
"""

from types import ModuleType
from typing import Any

import torch

import mpxla
from mpxla.compat.devices import device_backend
from mpxla.compat.patching import Patches
from mpxla.parallel.model import DistributedModel

__all__ = ["patch_accelerator", "patch_operations", "patch_optimizer", "patch_state"]


def patch_state(module: ModuleType, patches: Patches) -> None:
    """`accelerate.state`: numbers of processes are those of replicas."""
    state = module.PartialState

    def start(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            is_single = mpxla.size() == 1
            kind = module.DistributedType
            self._cpu = cpu
            self.backend = None if is_single else "gloo"
            self.device = device_backend().device
            self.debug = False
            self.distributed_type = kind.NO if is_single else kind.MULTI_CPU
            self.num_processes = mpxla.dp_size()
            self.process_index = mpxla.dp_rank()
            self.local_process_index = mpxla.local_rank()
        self.fork_launched = False

    patches.replace(state, "__init__", start)
    patches.replace(state, "is_main_process", property(lambda self: mpxla.rank() == 0))


def patch_operations(module: ModuleType, patches: Patches) -> None:
    """`accelerate.utils.operations`: collectives over the replicas, not over all ranks."""

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        parts = mpxla.allgather(torch.atleast_1d(tensor.detach()), mpxla.DP_GROUP)
        return torch.cat([part.to(tensor.device) for part in parts])

    def gather(tensor: Any) -> Any:
        return module.recursively_apply(gather_one, tensor, error_on_other_type=True)

    def gather_object(value: Any) -> list[Any]:
        return [item for part in mpxla.allgather(value, mpxla.DP_GROUP) for item in part]

    patches.replace(module, "_gpu_gather", gather)
    patches.replace(module, "_gpu_gather_object", gather_object)


def patch_optimizer(module: ModuleType, patches: Patches) -> None:
    """`accelerate.optimizer`: of updates that torch's fused optimizers skip, it does not know.

    So the learning rate moves on there, and has to here.
    """

    def is_skipped(self: Any) -> bool:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # of a DistributedOptimizer
        return self._is_overflow and not getattr(inner, "_step_supports_amp_scaling", False)

    patches.replace(module.AcceleratedOptimizer, "step_was_skipped", property(is_skipped))


def patch_accelerator(module: ModuleType, patches: Patches) -> None:
    """`accelerate.accelerator`: reductions over the replicas; what is inside a DistributedModel."""
    recursively_apply = module.recursively_apply

    def reduce_one(tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        parts = torch.stack([t.cpu() for t in mpxla.allgather(tensor.detach(), mpxla.DP_GROUP)])
        if reduction == "max":
            return parts.amax(0).to(tensor.device)
        total = parts.sum(0)
        return (total / len(parts) if reduction == "mean" else total).to(tensor.device)

    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        return recursively_apply(
            reduce_one, tensor, error_on_other_type=True, reduction=reduction, scale=scale
        )

    def unwrap(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        model = model.module if isinstance(model, DistributedModel) else model
        return unwrap_others(self, model, *args, **kwargs)

    patches.replace(module, "reduce", reduce)
    unwrap_others = patches.replace(module.Accelerator, "unwrap_model", unwrap)
