"""Which backend a process uses, and what is said where there is none."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

from mpxla import session
from mpxla.config import Config
from mpxla.device import choice
from mpxla.device.choice import open_backend
from mpxla.env import LaunchEnv, read_environment
from mpxla.errors import ConfigError
from mpxla.kept import Kept
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit


def installed(monkeypatch, *packages):
    def find_spec(name):
        return object() if name in packages else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.2")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    choice._decided.clear()
    monkeypatch.setattr(choice, "_opened", lambda name: name)


@pytest.fixture(autouse=True)
def decided_anew(monkeypatch):
    monkeypatch.delenv("MPXLA_DEVICE", raising=False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    choice._decided.clear()
    yield
    choice._decided.clear()


@pytest.mark.parametrize(
    "device, plugin, expected",
    [
        (None, None, "pjrt"),
        (None, "jax_cuda13_plugin", "pjrt"),
        (None, "libtpu", "torch_xla"),
        (None, "torch_neuronx", "torch_xla"),
        ("CPU", "jax_cuda13_plugin", "torch_xla"),
        ("CUDA", None, "pjrt"),
        ("TPU", None, "torch_xla"),
    ],
)
def test_jax_is_the_default_unless_a_device_of_torch_xla_is_asked_for(
    device, plugin, expected, monkeypatch
):
    if device is not None:
        monkeypatch.setenv("PJRT_DEVICE", device)
    installed(monkeypatch, "torch_xla", "jax", plugin)
    env = read_environment()
    assert open_backend(env) == open_backend(env, "auto") == expected
    assert open_backend(env, "pjrt") == "pjrt" and open_backend(env, "torch_xla") == "torch_xla"
    for package, name in (("jax", "pjrt"), ("torch_xla", "torch_xla")):
        installed(monkeypatch, package, plugin)
        assert open_backend(env) == name, "the only one"


def test_a_script_that_has_imported_torch_xla_runs_on_it(monkeypatch):
    installed(monkeypatch, "torch_xla", "jax")
    monkeypatch.setitem(sys.modules, "torch_xla", object())
    assert open_backend(LaunchEnv()) == "torch_xla"
    monkeypatch.delitem(sys.modules, "torch_xla")
    assert open_backend(LaunchEnv()) == "torch_xla", "decided once"


def test_an_import_of_torch_xla_after_the_choice_changes_nothing(monkeypatch):
    installed(monkeypatch, "torch_xla", "jax")
    assert open_backend(read_environment()) == "pjrt"
    monkeypatch.setitem(sys.modules, "torch_xla", object())
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # as torch_xla does
    assert open_backend(read_environment()) == "pjrt"


@pytest.mark.parametrize(
    "version, expected",
    [("0.9.2", "torch_xla"), ("0.10.0", "pjrt"), ("0.11.0.dev1", "pjrt"), ("1.0", "pjrt")],
)
def test_an_old_jax_is_no_default(version, expected, monkeypatch):
    installed(monkeypatch, "torch_xla", "jax")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert open_backend(LaunchEnv()) == expected


def test_what_is_missing_is_named_with_what_to_install(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"no backend is installed.*'mpxla\[torch-xla\]'"):
        open_backend(LaunchEnv())
    installed(monkeypatch, "jax")
    with pytest.raises(
        ConfigError, match=r"device torch_xla needs the package torch_xla, .*'mpxla\[torch-xla\]'"
    ):
        open_backend(LaunchEnv(), "torch_xla")
    with pytest.raises(
        ConfigError,
        match="MPXLA_DEVICE=tpu is not a backend; choose one of torch_xla, pjrt,",
    ):
        open_backend(LaunchEnv(device="tpu"))


def test_a_process_has_one_backend_which_the_environment_names(monkeypatch):
    null = ("torch", "mpxla.tests.device.null", "NullBackend")
    monkeypatch.setitem(choice.BACKENDS, "null", null)
    assert open_backend(LaunchEnv(), "null") is open_backend(LaunchEnv(), "null")
    assert read_environment({}).device is None
    assert read_environment({"MPXLA_DEVICE": "pjrt"}).device == "pjrt"


@pytest.mark.parametrize(
    "key, variable, expected",
    [("auto", None, "pjrt"), ("pjrt", None, "pjrt"), ("pjrt", "torch_xla", "torch_xla")],
)
def test_the_variable_wins_over_the_key(key, variable, expected, monkeypatch):
    asked = []
    installed(monkeypatch, "torch_xla", "jax")
    monkeypatch.setattr(choice, "_opened", lambda name: asked.append(name) or NullBackend())
    session._open_device(Config(device=key), LaunchEnv(device=variable))
    assert asked == [expected]


@pytest.mark.parametrize(
    "key, folder",
    [(None, "/home/me/.cache/mpxla/programs"), ("", ""), ("/scratch/kept", "/scratch/kept")],
)
def test_where_programs_are_kept(key, folder, monkeypatch, caplog):
    asked = []

    def opened(folder, kind):
        asked.append(folder)
        return Kept()

    monkeypatch.setattr(session, "open_backend", lambda env, key: NullBackend())
    monkeypatch.setattr(session, "open_kept", opened)
    session._open_device(Config(compile_cache=key), LaunchEnv(cache_dir="/home/me/.cache"))
    assert asked == [folder]
    said = "compile_cache keeps no compiled programs of null" in caplog.text
    assert said == bool(key), "only who asked for it is told"
    assert read_environment({"XDG_CACHE_HOME": "/cache"}).cache_dir == "/cache"


@pytest.mark.slow
def test_a_seed_of_numpy_from_before_the_start_is_that_of_after_it():
    script = (
        "import numpy as np, torch; np.random.seed(3); import mpxla as smp; smp.init({}); "
        "print(np.random.rand(), np.random.RandomState(3).rand())"
    )
    environment = os.environ | {"MPXLA_DEVICE": "pjrt"}
    command = [sys.executable, "-c", script]
    text = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    drawn, expected = text.stdout.split()[-2:]
    assert drawn == expected
