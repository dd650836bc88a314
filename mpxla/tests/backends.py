"""Which backends the ranks of tests run on: torch_xla where it is installed, or `MPXLA_DEVICE`."""

import pytest
import torch

from mpxla.device.choice import name_of_backend, open_backend
from mpxla.env import read_environment

__all__ = ["backend_here", "name_here", "on_device", "on_few_all_and_stages"]


def name_here():
    """The name of the ranks' backend, which is not opened."""
    return name_of_backend(read_environment())


def backend_here():
    """The backend of this process, which is a rank. Its first use claims the device."""
    return open_backend(read_environment())


def on_device(*values):
    """A float tensor [len(values)] of the device."""
    return torch.tensor([float(value) for value in values]).to(backend_here().device)


def on_few_all_and_stages(few, all_of_them):
    """Cases `stages, functions, env`: few functions on jax, all on torch_xla and in two stages."""
    jax = {"MPXLA_DEVICE": "pjrt"}
    return pytest.mark.parametrize(
        ("stages", "functions", "env"),
        [
            (1, few, jax),
            pytest.param(1, all_of_them, {}, marks=pytest.mark.slow),
            pytest.param(2, all_of_them, jax, marks=pytest.mark.slow),
        ],
        ids=["few", "all", "stages"],
    )
