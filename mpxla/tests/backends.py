"""Which backend the ranks of tests run on: torch_xla where it is installed, or `MPXLA_DEVICE`."""

import torch

from mpxla.device.choice import name_of_backend, open_backend
from mpxla.env import read_environment

__all__ = ["backend_here", "name_here", "on_device"]


def name_here():
    """The name of the ranks' backend, which is not opened."""
    return name_of_backend(read_environment())


def backend_here():
    """The backend of this process, which is a rank. Its first use claims the device."""
    return open_backend(read_environment())


def on_device(*values):
    """A float tensor [len(values)] of the device."""
    return torch.tensor([float(value) for value in values]).to(backend_here().device)
