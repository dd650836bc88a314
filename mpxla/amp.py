"""`smp.amp`: mixed precision by SMP's names."""

from mpxla.parallel.grad_scaler import GradScaler

__all__ = ["GradScaler"]
