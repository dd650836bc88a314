"""Compiled programs on disk, so that a second start neither compiles nor traces them.

jax has a cache of its own, which knows a program by its lowered form; to have that, jax must trace
the graph again, which takes several times as long as loading the program does. This one knows it by
the graph.
"""

import pickle
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from mpxla.device.pjrt.arrays import Device
from mpxla.env import compiler_flags
from mpxla.graph.fingerprint import torch_settings
from mpxla.kept import Kept, key_of
from mpxla.log import get_logger

__all__ = ["keep_program", "kept_program", "program_key"]


def program_key(device: Device, *parts: str) -> str:
    """The key of a program that is made of texts, for one kind of device.

    What else changes a program is part of it: versions, settings and XLA's flags.
    """
    facts = (
        (jax.__version__, jaxlib.__version__, device.client.platform_version),
        (device.platform, device.device_kind),
        compiler_flags(),
        sorted((name, repr(value)) for name, value in jax.config.values.items()),
    )
    return key_of("program", repr(facts), torch_settings(), *parts)


def kept_program(kept: Kept, key: str, device: Device) -> jax.stages.Compiled | None:
    """The program of a key, ready to be called, if it is there and can be loaded."""
    value = kept.get(key)
    if value is None:
        return None
    try:
        held: tuple[bytes, Any, Any] = pickle.loads(value)
        return serialize_executable.deserialize_and_load(*held, execution_devices=[device])
    except Exception as error:  # XLA raises anything
        get_logger().warning("a kept program cannot be loaded, and is compiled anew: %r", error)
        return None


def keep_program(kept: Kept, key: str, compiled: jax.stages.Compiled) -> None:
    """Keeps a program, if the device's runtime can write it down."""
    try:
        value = pickle.dumps(serialize_executable.serialize(compiled))
    except Exception as error:  # a plugin raises anything
        get_logger().debug("a program is not kept: %r", error)
        return
    kept.put(key, value)
