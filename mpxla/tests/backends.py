"""Which backend the ranks of tests run on: torch_xla where it is installed, or `MPXLA_DEVICE`."""

from mpxla.device.choice import open_backend
from mpxla.env import read_environment

__all__ = ["backend_here"]


def backend_here():
    """The backend of this process, which is a rank. Its first use claims the device."""
    return open_backend(read_environment())
