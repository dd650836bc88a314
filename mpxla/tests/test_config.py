"""Configuration: keys, sources and their priority, refused combinations."""

import dataclasses
import pickle
from typing import Any

import pytest

from mpxla import config_keys
from mpxla.config import Config
from mpxla.config_sources import resolve
from mpxla.env import LaunchEnv, prepare_xla, read_environment
from mpxla.errors import ConfigError

pytestmark = pytest.mark.unit

DEFAULTS: dict[str, Any] = {
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "memory_weight": 0.8,
    "ddp": False,
    "ddp_port": None,
    "ddp_dist_backend": "auto",
    "active_microbatches": 1,
    "deterministic_server": False,
    "tensor_parallel_degree": 1,
    "tensor_parallel_seed": 0,
    "prescaled_batch": False,
    "fp16_params": False,
    "fp16": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "shard_gradients": False,
    "skip_tracing": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "delayed_parameter_initialization": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_gather": "microbatch",
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "load_partition": False,
    "partition_file": None,
    "contiguous": True,
    "horovod": False,
    "virtual_pipeline_degree": 1,
    "schedule": None,
    "device": "auto",
    "compile_cache": None,
    "device_rates": "auto",
    "transport": "auto",
    "reduction_dtype": "same",
    "master_dtype": "float32",
    "stochastic_rounding": False,
    "stall_timeout_s": 300.0,
    "trust_checkpoints": False,
    "check_indices": "inputs",
    "log_metrics_every": 0,
    "metrics_dir": None,
    "activation_memory": "keep",
    "init_timeout_s": 120.0,
}
BOOLEANS = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]


def make(user=None, **launch):
    return resolve(user, LaunchEnv(**launch))


def refused(user=None, **launch):
    """Text of the error that resolving must raise."""
    with pytest.raises(ConfigError) as caught:
        make(user, **launch)
    return str(caught.value)


# Keys and values.


def test_defaults_of_all_keys(capsys):
    assert make().as_dict() == DEFAULTS
    assert Config().as_dict() == DEFAULTS
    assert capsys.readouterr().err == ""


def test_every_key_may_be_given_its_default():
    assert make(DEFAULTS).as_dict() == DEFAULTS


def test_a_typical_script():
    config = make(
        {
            "partitions": 4,
            "microbatches": 8,
            "pipeline": "simple",
            "optimize": "speed",
            "placement_strategy": "TPD",
            "auto_partition": False,
            "default_partition": 3,
            "ddp": True,
        }
    )
    assert (config.pipeline_parallel_degree, config.partitions) == (4, 4)
    assert (config.microbatches, config.pipeline) == (8, "simple")
    assert (config.placement_strategy, config.default_partition) == ("TPD", 3)
    assert config.auto_partition is False
    assert config.ddp is True


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name):
    assert f"{name}: 'True' (from smp.init) must be True or False" in refused({name: "True"})
    assert f"{name}: 2 (from smp.init) must be True or False" in refused({name: 2})
    assert f"{name}: None (from smp.init) must be True or False" in refused({name: None})
    assert getattr(make({name: int(DEFAULTS[name])}), name) is DEFAULTS[name]


def test_booleans_may_be_written_as_numbers():
    assert make({"ddp": 1}).ddp is True


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("pipeline_parallel_degree", 0, "an integer >= 1"),
        ("partitions", 0, "an integer >= 1"),
        ("microbatches", 0, "an integer >= 1"),
        ("microbatches", -1, "an integer >= 1"),
        ("microbatches", 4.0, "an integer >= 1"),
        ("microbatches", "4", "an integer >= 1"),
        ("microbatches", True, "an integer >= 1"),
        ("microbatches", None, "an integer >= 1"),
        ("active_microbatches", 0, "an integer >= 1"),
        ("tensor_parallel_degree", 0, "an integer >= 1"),
        ("tensor_parallel_seed", 1.5, "an integer"),
        ("sharded_data_parallel_degree", 0, "an integer >= 1"),
        ("activation_loading_horizon", 0, "an integer >= 1"),
        ("default_partition", -1, "an integer >= 0"),
        ("ddp_port", -1, "an integer >= 0"),
        ("ddp_port", "80", "an integer >= 0"),
        ("sdp_reduce_bucket_size", 0, "an integer >= 1"),
        ("sdp_reduce_bucket_size", 1.5, "an integer >= 1"),
        ("sdp_param_persistence_threshold", -1, "an integer >= 0"),
        ("sdp_max_live_parameters", 0, "an integer >= 1"),
        ("pipeline", "gpipe", "one of 'interleaved', 'eager_1f1b', 'simple'"),
        ("pipeline", ["simple"], "one of 'interleaved', 'eager_1f1b', 'simple'"),
        ("optimize", "size", "one of 'memory', 'speed'"),
        ("placement_strategy", "DDT", "one of 'cluster', 'spread', 'DPT', 'DTP', 'PDT', 'PTD'"),
        ("placement_strategy", "DP", "one of 'cluster'"),
        ("memory_weight", -0.1, "a number from 0 to 1"),
        ("memory_weight", 1.1, "a number from 0 to 1"),
        ("memory_weight", float("nan"), "a number from 0 to 1"),
        ("memory_weight", "0.5", "a number from 0 to 1"),
        ("memory_weight", True, "a number from 0 to 1"),
        ("sdp_gradient_clipping", 0, "a number > 0"),
        ("sdp_gradient_clipping", 10**400, "a number > 0"),
        ("stall_timeout_s", 0, "a number > 0"),
        ("init_timeout_s", 0, "a number > 0"),
        ("stall_timeout_s", float("inf"), "a number > 0"),
        ("ddp_dist_backend", 1, "a string"),
        ("ddp_dist_backend", None, "a string"),
        ("partition_file", 1, "a string"),
        ("log_metrics_every", -1, "an integer >= 0"),
        ("metrics_dir", 1, "a string"),
        ("check_indices", "none", "True, False or one of 'all', 'off', 'inputs'"),
        ("check_indices", 1, "True, False or one of"),
        ("device", "tpu", "one of 'auto', 'torch_xla', 'pjrt'"),
        ("activation_memory", 0, "an integer >= 1 or one of 'keep', 'recompute'"),
        ("activation_memory", "all", "an integer >= 1 or one of"),
        ("activation_memory", True, "an integer >= 1 or one of"),
        ("transport", "smoke", "one of 'auto', 'host', 'xla'"),
    ],
)
def test_values_outside_their_range(name, bad, expected):
    assert f"{name}: {bad!r} (from smp.init) must be {expected}" in refused({name: bad})
    if name != "partitions":
        with pytest.raises(ConfigError) as caught:
            Config(**{name: bad})
        assert f"{name}: {bad!r} must be {expected}" in str(caught.value)


def test_numbers_are_stored_in_one_type():
    config = make({"memory_weight": 1, "sdp_reduce_bucket_size": 5e7, "stall_timeout_s": 9})
    values = (config.memory_weight, config.sdp_reduce_bucket_size, config.stall_timeout_s)
    assert [repr(value) for value in values] == ["1.0", "50000000", "9.0"]


@pytest.mark.parametrize(
    "name",
    ["sdp_reduce_bucket_size", "sdp_param_persistence_threshold", "sdp_max_live_parameters"],
)
def test_sizes_may_be_written_with_an_exponent(name):
    assert getattr(make({name: 2e6}), name) == 2_000_000


@pytest.mark.parametrize(
    "strategy", ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]
)
def test_placement_strategies(strategy):
    assert make({"placement_strategy": strategy}).placement_strategy == strategy


@pytest.mark.parametrize("name", ["default_partition", "memory_weight", "active_microbatches"])
def test_none_means_not_given(name):
    assert make({name: None}).as_dict() == DEFAULTS
    assert make({name: None}).source(name) == "default"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("microbatchs", "microbatches"),
        ("partition", "partitions"),
        ("MicroBatches", "microbatches"),
        ("delayed_param_initialization", "delayed_parameter_initialization"),
    ],
)
def test_unknown_key_with_a_near_name(wrong, right):
    text = f"{wrong} (from smp.init) is not a configuration key; did you mean {right}?"
    assert text in refused({wrong: 4})


@pytest.mark.parametrize("wrong", ["zzz", 7, "sources", "set_by"])
def test_unknown_key_without_a_near_name(wrong):
    text = f"{wrong} (from smp.init) is not a configuration key; remove it; the keys are"
    assert text in refused({wrong: 4})


def test_init_wants_a_dict():
    assert "smp.init takes a dict of configuration keys, got ['ddp']" in refused(["ddp"])


# Aliases.


def test_both_spellings_may_agree():
    assert make({"partitions": 2, "pipeline_parallel_degree": 2}).pipeline_parallel_degree == 2


def test_two_spellings_that_differ():
    text = refused({"partitions": 2, "pipeline_parallel_degree": 4})
    assert (
        "partitions: 2 and pipeline_parallel_degree: 4 (from smp.init) are two spellings of one "
        "key; remove one"
    ) in text


def test_spellings_of_different_sources_do_not_conflict(capsys):
    config = make({"partitions": 2}, smp_parameters={"pipeline_parallel_degree": 4})
    assert config.pipeline_parallel_degree == 4
    assert (
        "pipeline_parallel_degree = 4 from SM_HP_MP_PARAMETERS overrides 2 from smp.init"
        in capsys.readouterr().err
    )


# Defaults that depend on other keys.


@pytest.mark.parametrize(
    ("partitions", "microbatches", "given", "expected"),
    [
        (2, 8, None, 4),
        (2, 3, None, 3),
        (4, 4, None, 4),
        (1, 1, None, 1),
        (2, 8, 6, 6),
        (2, 8, 8, 8),
        (2, 4, 9, 4),
    ],
)
def test_active_microbatches(partitions, microbatches, given, expected):
    user = {"partitions": partitions, "microbatches": microbatches, "active_microbatches": given}
    assert make(user).active_microbatches == expected


@pytest.mark.parametrize(("given", "expected"), [(None, 8), (2, 2), (9, 8)])
def test_simple_has_all_microbatches_in_flight_unless_told_otherwise(given, expected):
    user = {"pipeline": "simple", "microbatches": 8, "active_microbatches": given}
    assert make(user).active_microbatches == expected


def test_lowering_active_microbatches_is_logged(capsys):
    make({"microbatches": 4, "active_microbatches": 4})
    assert "is lowered" not in capsys.readouterr().err
    make({"microbatches": 4, "active_microbatches": 9})
    text = "active_microbatches = 9 is lowered to microbatches = 4"
    assert capsys.readouterr().err.count(text) == 1


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, 0.8),
        ({"optimize": "memory"}, 0.8),
        ({"optimize": "speed"}, 0.2),
        ({"optimize": "speed", "memory_weight": 0.0}, 0.0),
    ],
)
def test_memory_weight(user, expected):
    assert make(user).memory_weight == expected


# Sources and their priority.


def test_launcher_wins_over_init_over_default(capsys):
    config = make(
        {"microbatches": 2, "pipeline": "simple", "ddp": True},
        smp_parameters={"microbatches": 4},
        mpxla_config={"microbatches": 8, "optimize": "speed", "ddp": True},
    )
    assert (config.microbatches, config.pipeline, config.optimize) == (4, "simple", "speed")
    sources = ["microbatches", "optimize", "pipeline", "placement_strategy", "ddp"]
    assert [config.source(name) for name in sources] == [
        "launcher",
        "launcher",
        "init",
        "default",
        "launcher",
    ]
    log = capsys.readouterr().err
    assert "microbatches = 4 from SM_HP_MP_PARAMETERS overrides 2 from smp.init" in log
    assert "microbatches = 4 from SM_HP_MP_PARAMETERS overrides 8 from MPXLA_CONFIG" in log
    assert log.count("overrides") == 2


def test_problems_name_their_source():
    text = refused(
        {"pipeline": "x"}, smp_parameters={"microbatches": 0}, mpxla_config={"ddpp": True}
    )
    assert "pipeline: 'x' (from smp.init)" in text
    assert "microbatches: 0 (from SM_HP_MP_PARAMETERS)" in text
    assert "ddpp (from MPXLA_CONFIG) is not a configuration key; did you mean ddp?" in text


def test_an_overridden_value_must_be_valid_too():
    text = refused({"microbatches": 0}, smp_parameters={"microbatches": 4})
    assert "microbatches: 0 (from smp.init)" in text


def test_source_of_an_unknown_key():
    with pytest.raises(ConfigError, match=r"(?s)microbatchs .* did you mean microbatches\?"):
        Config().source("microbatchs")


def test_describe_lists_what_differs_from_the_defaults(capsys):
    config = make(
        {"microbatches": 4, "ddp": False, "active_microbatches": 2},
        smp_parameters={"pipeline": "simple"},
    )
    lines = [
        "microbatches = 4 (from init)",
        "pipeline = 'simple' (from launcher)",
        "active_microbatches = 2 (from init)",
    ]
    assert config.describe() == lines
    log = capsys.readouterr().err.splitlines()
    assert [line for line in log if "(from" in line] == [
        f"[mpxla] configuration: {line}" for line in lines
    ]


def test_only_rank_0_logs(capsys):
    make({"microbatches": 4, "ddp": True, "static_mode": True}, rank=1, world_size=2)
    assert capsys.readouterr().err == ""


def test_the_dict_of_the_script_is_not_kept():
    user = {"microbatches": 4}
    config = make(user)
    user["microbatches"] = 5
    assert config.microbatches == 4
    assert user == {"microbatches": 5}


# Variables of torch_xla.


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_downcasting_is_bf16(name, capsys):
    environ = {name: "1"}
    prepare_xla(environ)
    assert name not in environ  # torch_xla must not see it
    env = read_environment(environ)
    assert resolve({}, env).bf16
    assert f"{name} is deprecated by torch_xla; it means bf16: True here" in capsys.readouterr().err
    assert not resolve({"fp16": True}, env).bf16
    assert resolve({"bf16": False}, env).bf16 is False
    assert not resolve({}, read_environment({name: "0"})).bf16


# All problems at once.


def test_all_problems_are_reported_together():
    text = refused(
        {"microbatchs": 4, "pipeline": "x", "horovod": True, "auto_partition": False},
        mpxla_config={"microbatches": 0},
    )
    assert text.startswith("the configuration has 5 problems:\n  - ")
    assert text.count("\n  - ") == 5


def test_one_problem_is_singular():
    assert refused({"pipeline": "x"}).startswith("the configuration has a problem:\n  - pipeline")


def test_wrong_values_do_not_cause_further_noise():
    text = refused({"default_partition": "last", "auto_partition": False})
    assert text.count("\n  - ") == 1
    text = refused({"master_dtype": "float16", "sharded_data_parallel_degree": "2"})
    assert text.count("\n  - ") == 2
    assert "needs ddp" not in text


# Refused combinations.


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ({"auto_partition": False}, "auto_partition: False needs default_partition"),
        (
            {"partitions": 2, "default_partition": 2, "auto_partition": False},
            "default_partition: 2 must be below pipeline_parallel_degree: 2",
        ),
        ({"horovod": True}, "horovod: True is for TensorFlow only, and excludes ddp; remove it"),
        ({"horovod": True, "ddp": True}, "horovod: True is for TensorFlow only, and excludes ddp"),
        ({"ddp_port": 1234}, "ddp_port: 1234 needs the key ddp; set ddp, or remove ddp_port"),
        (
            {"ddp_dist_backend": "nccl"},
            "ddp_dist_backend: 'nccl' needs the key ddp; set ddp, or remove ddp_dist_backend",
        ),
    ],
)
def test_refused_combinations(user, text):
    problems = refused(user)
    assert text in problems
    assert problems.count("\n  - ") == 1


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree: 2 needs ddp: True"),
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree: 2 needs ddp: True"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "shard_optimizer_state": True},
            "sharded_data_parallel_degree: 2 already shards the optimizer state; remove "
            "shard_optimizer_state: True",
        ),
        ({"shard_gradients": True}, "shard_gradients: True needs ddp: True"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "shard_gradients": True},
            "sharded_data_parallel_degree: 2 already divides gradients; remove "
            "shard_gradients: True",
        ),
        (
            {"bf16": True, "fp16": True, "sharded_data_parallel_degree": 2, "ddp": True},
            "bf16: True and fp16: True exclude each other; remove one",
        ),
        (
            {"bf16": True, "fp16_params": True},
            "bf16: True and fp16_params: True exclude each other; remove one",
        ),
    ],
)
def test_refused_combinations_of_features(user, text):
    problems = refused(user)
    assert text in problems
    assert problems.count("\n  - ") == 1


@pytest.mark.parametrize(
    "user",
    [
        {"tensor_parallel_degree": 2, "ddp": True, "partitions": 2, "prescaled_batch": True},
        {"tensor_parallel_degree": 2, "ddp": True, "shard_optimizer_state": True, "bf16": True},
        {"sharded_data_parallel_degree": 2, "ddp": True, "bf16": True},
        {"sharded_data_parallel_degree": 2, "ddp": True, "partitions": 4},
        {"fp16": True},
    ],
)
def test_allowed_combinations_of_features(user):
    assert (
        make(user).as_dict().items()
        >= {name: value for name, value in user.items() if name != "partitions"}.items()
    )


def test_ddp_options_only_need_the_key():
    assert make({"ddp": False, "ddp_port": 1234}).ddp_port == 1234


# Keys without effect.


@pytest.mark.parametrize("name", sorted(config_keys.IGNORED_KEYS.keys() - {"horovod"}))
def test_ignored_keys_warn_once_with_the_reason(name, capsys):
    value = {
        "ddp_port": 1234,
        "ddp_dist_backend": "nccl",
        "sdp_reduce_bucket_size": 5,
    }.get(name, not DEFAULTS.get(name))
    make({name: value, "ddp": True}, smp_parameters={name: value})
    reason = config_keys.IGNORED_KEYS[name]
    text = f"[mpxla] warning: configuration: {name} is ignored: {reason}\n"
    assert capsys.readouterr().err.count(text) == 1


def test_defaults_that_are_spelled_out_are_nothing_to_warn_of(capsys):
    make({"ddp": True} | {n: DEFAULTS.get(n, False) for n in config_keys.IGNORED_KEYS})
    assert "warning" not in capsys.readouterr().err


def test_the_list_of_ignored_keys():
    assert sorted(config_keys.IGNORED_KEYS) == [
        "_fp32_grad_accumulation",
        "_match_weights",
        "_prescaled_batch",
        "checkpoint_attentions",
        "contiguous",
        "ddp_dist_backend",
        "ddp_port",
        "deterministic_server",
        "fast_mode",
        "horovod",
        "overlapping_allreduce",
        "sdp_reduce_bucket_size",
        "skip_tracing",
        "static_mode",
    ]


def test_an_unset_port_needs_no_warning(capsys):
    make({"ddp_port": None})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("user", "text"),
    [
        (
            {"sdp_gradient_clipping": 0.5},
            "sdp_gradient_clipping has no effect, because sharded_data_parallel_degree is 1",
        ),
        (
            {"sdp_max_live_parameters": 5},
            "sdp_max_live_parameters has no effect, because sharded_data_parallel_degree is 1",
        ),
        (
            {"sdp_param_persistence_threshold": 5},
            "sdp_param_persistence_threshold has no effect, because sharded_data_parallel_degree "
            "is 1 and shard_gradients is False",
        ),
        (
            {"partitions": 2, "default_partition": 1},
            "default_partition: 1 has no effect, because auto_partition is True",
        ),
        (
            {"auto_partition": False, "default_partition": 0, "memory_weight": 0.5},
            "memory_weight: 0.5 has no effect, because auto_partition is False",
        ),
    ],
)
def test_keys_without_effect_warn(user, text, capsys):
    make(user)
    log = capsys.readouterr().err
    assert log.count(f"[mpxla] warning: configuration: {text}\n") == 1
    assert log.count("warning") == 1


@pytest.mark.parametrize(
    "user",
    [
        {"partitions": 2, "default_partition": 0},
        {"auto_partition": False, "default_partition": 0},
        {"pipeline": "simple", "microbatches": 8, "active_microbatches": 2},
        {"pipeline": "interleaved", "microbatches": 8, "active_microbatches": 2},
        {"memory_weight": 0.5},
    ],
)
def test_keys_with_effect_do_not_warn(user, capsys):
    make(user)
    assert "warning" not in capsys.readouterr().err


# The number of processes.


def test_several_replicas_need_ddp():
    config = make({"partitions": 2})
    with pytest.raises(ConfigError) as caught:
        config.check_world_size(6)
    assert (
        "6 processes hold 3 replicas of the model (pipeline_parallel_degree 2 x "
        "tensor_parallel_degree 1 = 2 processes each), but ddp is False (from default), so nothing "
        "would average their gradients; set ddp: True, or start 2 processes, or raise "
        "pipeline_parallel_degree"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("user", "world_size"),
    [
        ({}, 1),
        ({"partitions": 2}, 2),
        ({"partitions": 2, "ddp": True}, 6),
        ({"ddp": True}, 1),
        ({"partitions": 2}, 5),  # replicas that do not come out even are for `Topology` to refuse
    ],
)
def test_world_sizes_without_a_problem(user, world_size):
    make(user).check_world_size(world_size)


def test_sharding_degree_divides_the_replicas():
    config = make({"ddp": True, "partitions": 2, "sharded_data_parallel_degree": 3})
    config.check_world_size(12)
    text = "sharded_data_parallel_degree: 3 must divide the number of replicas, which is 4 with 8"
    with pytest.raises(ConfigError, match=text):
        config.check_world_size(8)


# The object.


def test_spelling_and_source_make_no_other_configuration():
    same = make({"microbatches": 4, "ddp": True})
    assert same.as_dict() == make({"ddp": 1}, mpxla_config={"microbatches": 4}).as_dict()
    assert same.as_dict() != make({"microbatches": 5, "ddp": True}).as_dict()


def test_configurations_are_frozen_values():
    config: Any = make({"microbatches": 4})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.microbatches = 5
    assert config == Config(microbatches=4)
    assert config == make(smp_parameters={"microbatches": 4})
    assert hash(config) == hash(Config(microbatches=4))
    assert pickle.loads(pickle.dumps(config)) == config


def test_building_one_directly_fills_in_defaults_and_sources():
    config = Config(pipeline_parallel_degree=2, microbatches=8)
    assert config.active_microbatches == 4
    assert config.source("microbatches") == "init"
    assert config.source("active_microbatches") == "default"


def test_replacing_a_value_checks_again():
    config = make({"microbatches": 4, "active_microbatches": 4})
    assert dataclasses.replace(config, microbatches=2).active_microbatches == 2
    with pytest.raises(ConfigError, match="default_partition: 1 must be below"):
        dataclasses.replace(config, default_partition=1)


# --- partitions and schedules ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"load_partition": True}, "load_partition: True needs partition_file"),
        (
            {
                **{"load_partition": True, "partition_file": "cuts.json"},
                **{"auto_partition": False, "default_partition": 0},
            },
            "load_partition: True takes the decision from partition_file, and auto_partition: F",
        ),
        ({"pipeline": "custom"}, "pipeline: 'custom' needs the key schedule"),
        ({"schedule": "0F0 0B0"}, "schedule needs pipeline: 'custom'"),
        (
            {"pipeline": "zero_bubble_v", "virtual_pipeline_degree": 3},
            "virtual_pipeline_degree: 3 does not go with pipeline: 'zero_bubble_v'",
        ),
        (
            {"pipeline": "custom", "schedule": "0F0 0B0", "virtual_pipeline_degree": 2},
            "virtual_pipeline_degree: 2 does not go with pipeline: 'custom'",
        ),
        (
            {"virtual_pipeline_degree": 2, "auto_partition": False, "default_partition": 0},
            "several stages per rank .* cannot be formed; set auto_partition: True",
        ),
    ],
)
def test_partitions_and_schedules_that_cannot_be(keys, message):
    with pytest.raises(ConfigError, match=message):
        make(keys)


def test_several_stages_per_rank_need_more_active_microbatches():
    base = {"pipeline_parallel_degree": 4, "microbatches": 32}
    assert make(base).active_microbatches == 6
    assert make(base | {"virtual_pipeline_degree": 2}).active_microbatches == 8
    v = make(base | {"pipeline": "zero_bubble_v"})
    assert (v.active_microbatches, v.virtual_pipeline_degree) == (8, 2)
    assert make(base | {"pipeline": "zero_bubble"}).active_microbatches == 6
