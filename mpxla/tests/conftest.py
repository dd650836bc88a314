"""Settings of all tests."""

import gc
import importlib
import os
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from mpxla.tests.backends import name_here

# Tests run on torch_xla where it is installed, unless MPXLA_DEVICE names another backend: a process
# that has imported jax starts slower, and what is tested does not depend on it.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # but for the tests marked `device`
# Most of a test's time goes into LLVM, which makes tiny programs fast that run a few times. To run
# the tests with code as fast as in real use: XLA_FLAGS=--xla_backend_optimization_level=3 make test
# (The variable is there already: `import mpxla` has added a flag, and comes before this file.)
# XLA gives LLVM a program in 32 parts, for as many threads: as one, tiny ones take half the time.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Python searches all of torch and the tests for garbage again and again: 0.4 s each time, a tenth
# of what tests without ranks take. Much garbage comes of traces, which `mpxla.collection` sees to.
gc.set_threshold(*gc.get_threshold()[:2], 1_000)
# What one test leaves on disk others find, in this run only: so a key that says too little shows.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="mpxla-tests-")
    os.environ["XDG_CACHE_HOME"] = _cache.name

_ON_TORCH_XLA = name_here() == "torch_xla"
# These are about torch_xla, and some import it.
_OF_TORCH_XLA = [
    *("comm/test_xla_programs.py", "device/test_convolution.py", "device/torch_xla"),
    *("stage/test_joint.py", "test_world.py"),
]
collect_ignore = [] if _ON_TORCH_XLA else _OF_TORCH_XLA

# How fast the machine is decides over no test.
settings.register_profile("mpxla", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mpxla")


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="I/N", help="run the I-th (modulo N) of N parts of the tests"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves the tests of one part; a test stays in its part whatever other tests there are.

    Tests of torch_xla are left out where ranks run on another backend.
    """

    def leave_out(is_other):
        config.hook.pytest_deselected(items=[item for item in items if is_other(item)])
        items[:] = [item for item in items if not is_other(item)]

    if not _ON_TORCH_XLA:
        leave_out(lambda item: item.get_closest_marker("torch_xla") is not None)
    if config.option.part is not None:
        part, count = map(int, config.option.part.split("/"))
        leave_out(lambda item: (zlib.crc32(item.nodeid.encode()) - part) % count)


@pytest.fixture(autouse=True)
def no_code_of_graphs():
    """Graphs get Python code where it is called, as in steps: see `mpxla.stage.making`."""
    with _use_lazy_graph_module(True):
        yield


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports modules of the benchmarks' folder, which are forgotten afterwards."""
    folder = Path(__file__).parents[2] / "benchmarks"
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
