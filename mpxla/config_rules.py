"""How configuration keys constrain each other.

Every rule is a row of a table: the keys it concerns, when it strikes, and what the user reads. The
rows see plain values by key; they must not know where values come from (`config` does).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

__all__ = ["IDLE", "REFUSED", "broken"]

Values = Mapping[str, Any]


class Rule(NamedTuple):
    """One constraint between keys."""

    keys: tuple[str, ...]
    """The keys it looks at; it is skipped if one of them is known to be wrong."""
    strikes: Callable[[Values, Collection[str]], bool]
    """Whether it is broken, given the values of all keys and the keys that somebody set."""
    text: str
    """What the user reads; `{key}` stands for a value."""


REFUSED = (
    Rule(
        ("auto_partition", "default_partition"),
        lambda v, given: not v["auto_partition"] and v["default_partition"] is None,
        "auto_partition: False needs default_partition, the partition of modules that no "
        "smp.partition places",
    ),
    Rule(
        ("default_partition", "pipeline_parallel_degree"),
        lambda v, given: (v["default_partition"] or 0) >= v["pipeline_parallel_degree"],
        "default_partition: {default_partition} must be below pipeline_parallel_degree: "
        "{pipeline_parallel_degree}",
    ),
    Rule(
        ("load_partition", "partition_file"),
        lambda v, given: v["load_partition"] and not v["partition_file"],
        "load_partition: True needs partition_file, the file to load the decision from",
    ),
    Rule(
        ("load_partition", "auto_partition"),
        lambda v, given: v["load_partition"] and not v["auto_partition"],
        "load_partition: True takes the decision from partition_file, and auto_partition: False "
        "from smp.partition; remove one of them",
    ),
    Rule(
        ("pipeline", "schedule"),
        lambda v, given: v["pipeline"] == "custom" and not v["schedule"],
        "pipeline: 'custom' needs the key schedule, the text of the schedule to run",
    ),
    Rule(
        ("pipeline", "schedule"),
        lambda v, given: v["pipeline"] != "custom" and v["schedule"] is not None,
        "schedule needs pipeline: 'custom'; with pipeline: {pipeline!r} its text would not run",
    ),
    Rule(
        ("pipeline", "virtual_pipeline_degree"),
        lambda v, given: (
            v["pipeline"] == "zero_bubble_v" and v["virtual_pipeline_degree"] not in (None, 2)
        ),
        "virtual_pipeline_degree: {virtual_pipeline_degree} does not go with pipeline: "
        "'zero_bubble_v', which has 2 stages on each rank; remove it",
    ),
    Rule(
        ("pipeline", "virtual_pipeline_degree"),
        lambda v, given: v["pipeline"] == "custom" and (v["virtual_pipeline_degree"] or 1) > 1,
        "virtual_pipeline_degree: {virtual_pipeline_degree} does not go with pipeline: 'custom', "
        "whose text says which rank has which stages; remove it",
    ),
    Rule(
        ("pipeline", "virtual_pipeline_degree", "auto_partition"),
        lambda v, given: (
            not v["auto_partition"]
            and (v["pipeline"] == "zero_bubble_v" or (v["virtual_pipeline_degree"] or 1) > 1)
        ),
        "auto_partition: False gives each rank the modules that smp.partition names, so that "
        "several stages per rank (pipeline: {pipeline!r}, virtual_pipeline_degree: "
        "{virtual_pipeline_degree}) cannot be formed; set auto_partition: True",
    ),
    Rule(
        ("horovod",),
        lambda v, given: v["horovod"],
        "horovod: True is for TensorFlow only, and excludes ddp; remove it and set ddp: True for "
        "data parallelism",
    ),
    *(
        Rule(
            (key, "ddp"),
            lambda v, given, key=key: key in given and "ddp" not in given,
            f"{key}: {{{key}!r}} needs the key ddp; set ddp, or remove {key}",
        )
        for key in ("ddp_port", "ddp_dist_backend")
    ),
    *(
        Rule(
            (degree, "ddp"),
            lambda v, given, degree=degree: v[degree] > 1 and not v["ddp"],
            f"{degree}: {{{degree}}} needs ddp: True",
        )
        for degree in ("tensor_parallel_degree", "sharded_data_parallel_degree")
    ),
    Rule(
        ("sharded_data_parallel_degree", "shard_optimizer_state"),
        lambda v, given: v["sharded_data_parallel_degree"] > 1 and v["shard_optimizer_state"],
        "sharded_data_parallel_degree: {sharded_data_parallel_degree} already shards the optimizer "
        "state; remove shard_optimizer_state: True",
    ),
    Rule(
        ("sharded_data_parallel_degree", "shard_gradients"),
        lambda v, given: v["sharded_data_parallel_degree"] > 1 and v["shard_gradients"],
        "sharded_data_parallel_degree: {sharded_data_parallel_degree} already divides gradients; "
        "remove shard_gradients: True",
    ),
    Rule(
        ("shard_gradients", "ddp"),
        lambda v, given: v["shard_gradients"] and not v["ddp"],
        "shard_gradients: True needs ddp: True",
    ),
    *(
        Rule(
            ("bf16", precision),
            lambda v, given, key=precision: v["bf16"] and v[key],
            f"bf16: True and {precision}: True exclude each other; remove one",
        )
        for precision in ("fp16", "fp16_params")
    ),
    *(
        Rule(
            ("stochastic_rounding", precision),
            lambda v, given, key=precision: v["stochastic_rounding"] and v[key],
            f"stochastic_rounding: True is for bfloat16; {precision}: True keeps float32 masters, "
            "which lose no update; remove one",
        )
        for precision in ("fp16", "fp16_params")
    ),
    Rule(
        ("stochastic_rounding", "master_dtype"),
        lambda v, given: (
            v["stochastic_rounding"] and "master_dtype" in given and v["master_dtype"] == "float32"
        ),
        "stochastic_rounding: True trains without masters; remove it or master_dtype: float32",
    ),
)
"""Combinations that are refused."""

_SHARDING_KEYS = (
    "sdp_max_live_parameters",
    "sdp_gather",
    "sdp_hierarchical_allgather",
    "sdp_gradient_clipping",
)
IDLE = (
    *(
        Rule(
            (key, "sharded_data_parallel_degree"),
            lambda v, given, key=key: key in given and v["sharded_data_parallel_degree"] == 1,
            f"{key} has no effect, because sharded_data_parallel_degree is 1",
        )
        for key in _SHARDING_KEYS
    ),
    Rule(
        ("sdp_param_persistence_threshold", "sharded_data_parallel_degree", "shard_gradients"),
        lambda v, given: (
            "sdp_param_persistence_threshold" in given
            and v["sharded_data_parallel_degree"] == 1
            and not v["shard_gradients"]
        ),
        "sdp_param_persistence_threshold has no effect, because sharded_data_parallel_degree is 1 "
        "and shard_gradients is False",
    ),
    Rule(
        ("activation_loading_horizon", "offload_activations"),
        lambda v, given: "activation_loading_horizon" in given and not v["offload_activations"],
        "activation_loading_horizon has no effect, because offload_activations is False",
    ),
    Rule(
        ("default_partition", "auto_partition"),
        lambda v, given: v["auto_partition"] and bool(v["default_partition"]),
        "default_partition: {default_partition} has no effect, because auto_partition is True",
    ),
    Rule(
        ("memory_weight", "auto_partition"),
        lambda v, given: not v["auto_partition"] and v["memory_weight"] is not None,
        "memory_weight: {memory_weight} has no effect, because auto_partition is False",
    ),
)
"""Keys that were set but change nothing, because of other keys."""


def broken(
    rules: tuple[Rule, ...], values: Values, given: Collection[str], wrong: Collection[str] = ()
) -> list[str]:
    """Finds the rules that values break.

    Args:
        rules: which ones.
        values: Value of every key as given, None for keys whose default depends on others.
        given: Keys that somebody set.
        wrong: Keys already known to be wrong; rules about them are skipped.

    Returns:
        Texts for the user.
    """
    return [
        rule.text.format(**values)
        for rule in rules
        if not set(rule.keys) & set(wrong) and rule.strikes(values, given)
    ]
