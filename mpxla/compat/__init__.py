"""Runs scripts written for SMP on CUDA devices, unedited, on XLA devices.

    torchrun --nproc_per_node 2 -m mpxla.compat train.py --its-own-flags
    python -m mpxla.compat --check train.py

The launcher (`launcher.py`) gives a script the package `smdistributed.modelparallel.torch`
(`alias.py`) and maps the CUDA names that it touches onto the rank's XLA device. Nothing of torch is
changed outside the launcher. `names.py` says what is mapped, and is all that `check.py` needs.
"""

from mpxla.errors import MpxlaError

__all__ = ["CompatError"]


class CompatError(MpxlaError):
    """A script uses a name that has no counterpart on an XLA device, or that mpxla does not have.

    Example: ``torch.cuda.CUDAGraph()``. The text names the script's line and the reason.
    """
