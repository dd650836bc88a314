"""Training on an accelerator that jax finds, as plain PyTorch trains in one process.

`make test-device` runs these tests. Products are full float32, as PyTorch's are: jax's default on
CUDA is TF32.
"""

import functools
import os
import subprocess
import sys

import pytest

from mpxla.tests.parity import train, train_plainly
from mpxla.tests.parity_checks import assert_parity, assert_promises
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_parity import case_of

pytestmark = [pytest.mark.device, pytest.mark.ranks]

DEVICE = {"MPXLA_DEVICE": "pjrt", "JAX_PLATFORMS": ""}
SHARED = {**DEVICE, "CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
COUNT = """
import jax
devices = jax.local_devices()
print(devices[0].platform, len(devices))
"""


@functools.cache
def devices_of_this_machine():
    """Their platform and number; in another process, since this one must not claim any."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, env=os.environ | DEVICE
    )
    return done.stdout.split() if done.returncode == 0 else ("none", "0")


def require(number):
    platform, found = devices_of_this_machine()
    if platform in ("cpu", "none") or int(found) < number:
        pytest.skip(f"needs {number} accelerators, and jax finds {found} of the kind {platform}")


def assert_trains(case, env):
    observed = run_ranks(train, case.stages, case, timeout_s=280, env=env)
    assert_parity(observed, train_plainly(case))
    assert_promises(case, observed)


@pytest.mark.parametrize("name", ["mlp", "conv_net", "gpt", "vit", "unet"])
def test_one_process_trains_like_pytorch(name):
    require(1)
    assert_trains(case_of(name, "1x2I"), DEVICE)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_two_processes_share_a_device(name):
    require(1)
    assert_trains(case_of(name, "2x4I"), SHARED)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_every_process_has_a_device(name):
    require(2)
    assert_trains(case_of(name, "2x4I"), DEVICE)
