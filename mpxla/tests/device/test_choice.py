"""Which backend a process uses, and what is said where there is none."""

import importlib.util

import pytest

from mpxla.device import choice
from mpxla.device.choice import open_backend
from mpxla.env import read_environment
from mpxla.errors import ConfigError

pytestmark = pytest.mark.unit


def installed(monkeypatch, *packages):
    def find_spec(name):
        return object() if name in packages else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(choice, "_opened", lambda name: name)


def test_the_first_that_is_installed_is_the_default(monkeypatch):
    installed(monkeypatch, "torch_xla", "jax")
    assert open_backend() == "torch_xla"
    assert open_backend("auto") == "torch_xla"
    assert open_backend("pjrt") == "pjrt"
    installed(monkeypatch, "jax")
    assert open_backend() == "pjrt"


def test_what_is_missing_is_named_with_what_to_install(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"no backend is installed.*'mpxla\[torch-xla\]'"):
        open_backend()
    installed(monkeypatch, "jax")
    with pytest.raises(
        ConfigError, match=r"device torch_xla needs the package torch_xla, .*'mpxla\[torch-xla\]'"
    ):
        open_backend("torch_xla")
    with pytest.raises(
        ConfigError, match="MPXLA_DEVICE=tpu is not a backend; choose one of torch_xla, pjrt, or"
    ):
        open_backend("tpu")


def test_a_process_has_one_backend_which_the_environment_names(monkeypatch):
    null = ("torch", "mpxla.device.null", "NullBackend")
    monkeypatch.setitem(choice.BACKENDS, "null", null)
    assert open_backend("null") is open_backend("null")
    assert read_environment({}).device is None
    assert read_environment({"MPXLA_DEVICE": "pjrt"}).device == "pjrt"
