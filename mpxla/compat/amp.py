"""Mixed precision by CUDA's names: autocast on the XLA device; loss scaling is refused."""

from typing import Any

import torch

from mpxla.compat import CompatError
from mpxla.user_lines import at_script_line

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


class GradScaler:
    """`torch.cuda.amp.GradScaler`, which may be made but not used, unless it is disabled.

    Scripts make a scaler whether or not they use it. A disabled one passes everything on, as in
    torch.

    Args:
        *args: torch's settings of the scale.
        enabled: whether it scales.
        **kwargs: torch's settings of the scale, by keyword.
    """

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any):
        is_last = len(args) == 5 or (len(args) == 6 and isinstance(args[0], str))
        self._enabled = bool(args[-1]) if is_last else enabled

    def is_enabled(self) -> bool:
        """Whether it scales."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """Passes outputs on; an error if enabled."""
        self._refuse("scale")
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing; an error if enabled."""
        self._refuse("unscale_")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`; an error if enabled."""
        self._refuse("step")
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Does nothing; an error if enabled."""
        self._refuse("update")

    def get_scale(self) -> float:
        """1.0; an error if enabled."""
        self._refuse("get_scale")
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Nothing; an error if enabled."""
        self._refuse("state_dict")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing; an error if enabled."""
        self._refuse("load_state_dict")

    def _refuse(self, method: str) -> None:
        if self._enabled:
            raise CompatError(
                f"{at_script_line()}: GradScaler.{method}() belongs to loss scaling (fp16 "
                f"training), which mpxla does not have yet. Use GradScaler(enabled=False), with "
                f"bfloat16 if autocast is wanted."
            )
