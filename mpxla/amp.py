"""`smp.amp`: mixed precision by SMP's names."""

from mpxla.parallel.gradients.grad_scaler import GradScaler

__all__ = ["GradScaler"]
