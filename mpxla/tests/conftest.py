"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# Most of a test's time goes into LLVM, which makes tiny programs fast that run a few times. To run
# the tests with code as fast as in real use: XLA_FLAGS= make test
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Tests compile; those of the cache turn it on.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")

# How fast the machine is decides over no test.
settings.register_profile("mpxla", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mpxla")
