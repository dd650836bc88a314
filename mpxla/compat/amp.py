"""Mixed precision by CUDA's names: autocast on the XLA device, and smp.amp's loss scaling."""

import torch

from mpxla.parallel.grad_scaler import GradScaler

__all__ = ["Autocast", "GradScaler"]


class Autocast(torch.autocast):
    """`torch.cuda.amp.autocast` for the XLA device.

    Args:
        enabled: whether the region casts.
        dtype: None for the device's own half precision, bfloat16.
        cache_enabled: whether casts of parameters are kept during the region.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ):
        super().__init__("xla", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
