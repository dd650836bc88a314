"""Compiled programs on disk, so that a second start neither compiles nor traces them.

jax has a cache of its own, which knows a program by its lowered form; to have that, jax must trace
the graph again, which takes several times as long as loading the program does. This one knows it by
the graph.
"""

import pickle
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import lapack

from mpxla.device.pjrt.arrays import Device
from mpxla.env import compiler_flags, xla_threads
from mpxla.graph.fingerprint import torch_settings
from mpxla.kept import key_of

__all__ = ["program_key", "read_program", "write_program"]


def program_key(device: Device, *parts: str) -> str:
    """The key of a program that is made of texts, for one kind of device.

    What else changes a program is part of it: versions, settings and XLA's flags.
    """
    # XLA's code for the CPU, and what calls libraries there, is divided among so many threads.
    facts = (
        (jax.__version__, jaxlib.__version__, device.client.platform_version),
        (device.platform, device.device_kind, xla_threads() if device.platform == "cpu" else None),
        compiler_flags(),
        sorted((name, repr(value)) for name, value in jax.config.values.items()),
    )
    return key_of("program", repr(facts), torch_settings(), *parts)


def read_program(value: bytes, device: Device) -> jax.stages.Compiled:
    """What `write_program` has written, ready to be called."""
    held: tuple[bytes, Any, Any] = pickle.loads(value)
    if b"lapack_" in held[0]:  # jax loads the library when it traces such a program
        lapack.prepare_lapack_call("getrf_ffi", np.dtype(np.float32))
    return serialize_executable.deserialize_and_load(*held, execution_devices=[device])


def write_program(compiled: jax.stages.Compiled) -> bytes:
    """A program as bytes; raises what it likes where the device's runtime cannot write it down."""
    return pickle.dumps(serialize_executable.serialize(compiled))
