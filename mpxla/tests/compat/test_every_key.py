"""Every configuration key of SMP: it works, has no effect and says so, or is refused.

What only saves memory or time may have no effect; what changes the result may not.
"""

import pytest

from mpxla.config_sources import resolve
from mpxla.env import LaunchEnv
from mpxla.errors import ConfigError

pytestmark = pytest.mark.unit

WORKS = {
    "pipeline_parallel_degree": 2,
    "partitions": 2,
    "microbatches": 4,
    "pipeline": "simple",
    "optimize": "speed",
    "placement_strategy": "spread",
    "memory_weight": 0.5,
    "ddp": True,
    "active_microbatches": 1,
    "prescaled_batch": True,
    "tensor_parallel_seed": 3,
    "shard_optimizer_state": True,
    "delayed_parameter_initialization": True,
    "partition_file": "decision.json",
    "tensor_parallel_degree": 2,
    "fp16": True,
    "fp16_params": True,
    "bf16": True,
    "offload_activations": True,
    "sharded_data_parallel_degree": 2,
}
WARNS = {
    "ddp_port": 1234,
    "ddp_dist_backend": "nccl",
    "deterministic_server": True,
    "skip_tracing": True,
    "activation_loading_horizon": 2,
    "sdp_reduce_bucket_size": 5e7,
    "sdp_param_persistence_threshold": 10,
    "sdp_max_live_parameters": 10,
    "sdp_hierarchical_allgather": False,
    "sdp_gradient_clipping": 0.5,
    "default_partition": 1,
    "contiguous": False,
    "static_mode": True,
    "fast_mode": True,
    "checkpoint_attentions": True,
    "_match_weights": True,
    "_fp32_grad_accumulation": True,
    "_prescaled_batch": True,
    "overlapping_allreduce": True,
}
REFUSED = {
    "horovod": True,
    "load_partition": True,
    "auto_partition": False,
}


def warnings_of(keys, capsys):
    # The last one is what tensor parallelism needs.
    also = {"pipeline_parallel_degree": 2, "prescaled_batch": True}
    resolve({"ddp": True, **also, **keys}, LaunchEnv())
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


@pytest.mark.parametrize("key", WORKS)
def test_keys_that_work(key, capsys):
    assert not warnings_of({key: WORKS[key]}, capsys)


@pytest.mark.parametrize("key", WARNS)
def test_keys_that_have_no_effect_say_so_once(key, capsys):
    (line,) = warnings_of({key: WARNS[key]}, capsys)
    assert key in line and ("no effect" in line or "is ignored: " in line)


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_change_the_result_are_refused(key):
    with pytest.raises(ConfigError, match=key):
        resolve({"ddp": True, key: REFUSED[key]}, LaunchEnv())


def test_every_key_is_in_the_table():
    from mpxla.config_keys import ALIASES, IGNORED_KEYS
    from mpxla.tests.test_config import DEFAULTS

    own = {"virtual_pipeline_degree", "schedule", "transport", "reduction_dtype", "check_indices"}
    own |= {"device", "compile_cache", "activation_memory", "log_metrics_every", "metrics_dir"}
    own |= {"master_dtype", "stochastic_rounding", "shard_gradients"}
    own |= {"sdp_gather", "device_rates"}
    own |= {"stall_timeout_s", "init_timeout_s", "trust_checkpoints"}
    known = {*DEFAULTS, *ALIASES, *IGNORED_KEYS} - own
    assert known == {*WORKS, *WARNS, *REFUSED}
