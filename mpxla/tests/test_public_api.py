"""The surface of mpxla, literally: whoever changes a name, a signature or a key changes it here."""

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import mpxla as smp
from mpxla.config import Config

pytestmark = pytest.mark.unit

NAMES = {
    # Start and end.
    *("init", "shutdown", "is_initialized", "is_tracing", "state", "num_microbatches"),
    # Ranks and sizes.
    *("rank", "size", "local_rank", "local_size"),
    *("mp_rank", "mp_size", "dp_rank", "dp_size", "pp_rank", "pp_size"),
    *("tp_rank", "tp_size", "rdp_rank", "rdp_size"),
    # Groups.
    *("get_mp_group", "get_dp_group", "get_tp_group", "get_pp_group", "get_rdp_group"),
    *("get_world_process_group", "get_mp_process_group", "get_dp_process_group"),
    *("get_pp_process_group", "get_tp_process_group", "get_rdp_process_group"),
    *("CommGroup", "WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"),
    "RankType",
    # Objects.
    *("broadcast", "send", "recv_from", "allgather", "barrier", "dp_barrier", "mp_barrier"),
    # Training.
    *("step", "StepOutput", "DistributedModel", "DistributedOptimizer"),
    *("partition", "set_partition", "delay_param_initialization", "model_creation"),
    *("profile", "clip_grad_norm_", "debug_print", "metrics", "write_metrics"),
    *("set_activation_checkpointing", "set_tensor_parallelism", "tensor_parallelism"),
    *("tp_register", "tp_register_with_module", "register_parameter"),
    # Checkpoints.
    *("save", "load", "save_checkpoint", "resume_from_checkpoint"),
    # Errors.
    *("MpxlaError", "ConfigError", "TopologyError", "CaptureError", "PartitionError"),
    "CheckpointError",
    *("ScheduleError", "LoweringError", "StepError", "PeerFailure", "RankMismatch"),
    "__version__",
}

SIGNATURES = {
    "init": "config=None",
    "shutdown": "",
    "is_initialized": "",
    "is_tracing": "",
    "broadcast": "obj, group",
    "send": "obj, dest_rank, rank_type=RankType.WORLD_RANK",
    "recv_from": "src_rank, rank_type=RankType.WORLD_RANK",
    "allgather": "obj, group",
    "barrier": "group=CommGroup.WORLD",
    "dp_barrier": "",
    "mp_barrier": "",
    "step": "function=None, non_split_inputs=None, input_split_axes=None, detach_outputs=True",
    "partition": "index",
    "profile": "path",
    "metrics": "",
    "write_metrics": "writer, step, prefix='mpxla/'",
    "debug_print": "tensor, label=None",
    "clip_grad_norm_": "parameters, max_norm, norm_type=2.0, error_if_nonfinite=False",
    "set_partition": "module, index",
    "set_activation_checkpointing": "module, preserve_rng_state=True, pack_args_as_tuple=False, "
    "strategy='each'",
    "set_tensor_parallelism": "module, enabled=True, **settings",
    "tensor_parallelism": "enabled=True, **settings",
    "tp_register": "dist_module, init_hook=None, forward_hook=None, return_hook=None",
    "tp_register_with_module": "module_cls, dist_module, init_hook=None, forward_hook=None, "
    "return_hook=None",
    "delay_param_initialization": "enabled=True",
    "register_parameter": "module, parameter",
    "model_creation": "tensor_parallelism=False, dtype=None, zero_init=False, "
    "**tensor_parallel_config",
    "load": "f, map_location=None, pickle_module=None, partial=True, back_compat=False, "
    "weights_only=None, **pickle_load_args",
    "save_checkpoint": "path, tag, partial=True, model=None, optimizer=None, user_content=None, "
    "translate_if_full=True, num_kept_partial_checkpoints=None, asynchronous=False, dtype=None",
    "resume_from_checkpoint": "path, tag=None, partial=True, strict=True, load_optimizer=True, "
    "load_sharded_optimizer_state=True, translate_function=None, load_optimizer_states=None, "
    "weights_only=None, model=None",
    "DistributedModel": "module, trace_device='gpu', trace_execution_times=False, "
    "overlapping_allreduce=True, backward_passes_per_step=1, "
    "average_grads_across_microbatches=True, bucket_cap_mb=25, trace_memory_usage=False, "
    "broadcast_buffers=True, gradient_as_bucket_view=False",
    "DistributedOptimizer": "optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, "
    "dynamic_loss_args=None, **settings",
}

METHODS = {
    "DistributedModel": {
        "forward": "*args, **kwargs",
        "backward": "tensors, grad_tensors=None",
        "get_module": "",
        "local_buffers": "",
        "local_named_buffers": "",
        "local_parameters": "",
        "local_named_parameters": "",
        "local_modules": "",
        "local_named_modules": "",
        "local_state_dict": "",
        "state_dict": "*args, gather_to_rank0=False, **kwargs",
        "load_state_dict": "state_dict, strict=True, same_partition_load=False, assign=False",
        "register_post_partition_hook": "hook",
        "register_post_step_hook": "hook",
        "cpu": "",
        "join": "",
        "register_comm_hook": "state, hook",
        "partition_report": "",
    },
    "DistributedOptimizer": {
        "step": "closure=None",
        "zero_grad": "set_to_none=True",
        "state_dict": "",
        "load_state_dict": "state_dict",
        "local_state_dict": "gather_if_shard=True",
        "orig_state_dict": "",
        "add_param_group": "param_group",
    },
    "StepOutput": {"reduce_mean": "", "reduce_sum": "", "concat": "", "stack": ""},
}
PROPERTIES = {
    "DistributedModel": {"partitioned"},
    "DistributedOptimizer": {"param_groups", "state", "defaults"},
    "StepOutput": {"outputs"},
}

CONFIG_KEYS = {
    *("pipeline_parallel_degree", "microbatches", "pipeline", "optimize", "placement_strategy"),
    *("auto_partition", "default_partition", "memory_weight", "ddp", "ddp_port"),
    *("ddp_dist_backend", "active_microbatches", "deterministic_server"),
    *("tensor_parallel_degree", "tensor_parallel_seed", "prescaled_batch", "fp16_params"),
    *("fp16", "bf16", "shard_optimizer_state", "skip_tracing", "offload_activations"),
    *("activation_loading_horizon", "delayed_parameter_initialization"),
    *("sharded_data_parallel_degree", "sdp_reduce_bucket_size"),
    *("sdp_param_persistence_threshold", "sdp_max_live_parameters"),
    *("sdp_hierarchical_allgather", "sdp_gradient_clipping"),
    *("load_partition", "partition_file", "contiguous", "horovod"),
    # Extensions.
    *("device", "compile_cache", "shard_gradients", "sdp_gather"),
    *("transport", "reduction_dtype", "stall_timeout_s", "init_timeout_s"),
    *("trust_checkpoints", "master_dtype", "stochastic_rounding"),
    *("check_indices", "activation_memory"),
    *("log_metrics_every", "metrics_dir"),
    *("virtual_pipeline_degree", "schedule", "device_rates"),
}


def signature(function):
    """Parameters without annotations."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return ", ".join(
        f"{p.name}={p.default}" if isinstance(p.default, smp.CommGroup | smp.RankType) else str(p)
        for p in parameters
        if p.name != "self"
    )


def test_names():
    assert set(smp.__all__) == NAMES
    assert len(smp.__all__) == len(NAMES), "every name once"
    assert set(dir(smp)) == NAMES


def test_every_name_can_be_read():
    for name in NAMES:
        assert getattr(smp, name) is not None
    assert smp.step is importlib.import_module("mpxla.runtime.step").step
    assert smp.WORLD is smp.CommGroup.WORLD
    assert smp.RDP_GROUP is smp.CommGroup.RDP_GROUP


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="module 'mpxla' has no attribute 'micro_batches'"):
        smp.micro_batches  # noqa: B018 - reading is the test


def test_ranks_and_sizes_take_no_arguments():
    getters = [n for n in NAMES if n.endswith(("_rank", "_size")) or n.startswith("get_")]
    for name in (*getters, "rank", "size", "num_microbatches"):
        assert signature(getattr(smp, name)) == "", name


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature(getattr(smp, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    kinds = [k for k in getattr(smp, name).__mro__ if k.__module__.startswith("mpxla.")]
    members = {key: value for kind in reversed(kinds) for key, value in vars(kind).items()}
    own = {key: value for key, value in members.items() if key[0] != "_"}
    for method, expected in METHODS[name].items():
        assert signature(own[method]) == expected, method
    properties = {key for key, value in own.items() if isinstance(value, property)}
    assert properties >= PROPERTIES[name]


def test_members_of_the_enumerations():
    groups = ["WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"]
    assert {group.name for group in smp.CommGroup} == set(groups)
    ranks = ["WORLD_RANK", "MP_RANK", "DP_RANK", "PP_RANK", "TP_RANK", "RDP_RANK"]
    assert {kind.name for kind in smp.RankType} == set(ranks)


def test_configuration_keys():
    keys = {f.name for f in dataclasses.fields(Config) if f.metadata}
    assert keys == CONFIG_KEYS
    assert Config().partitions == 1, "the other spelling can be read too"


def modules_of(package):
    path = Path(package.__file__).parent
    return {name for _, name, _ in pkgutil.iter_modules([str(path)])}


def test_modules_do_not_shadow_public_names():
    """`mpxla.step` would become the module as soon as somebody imported `mpxla.step`."""
    assert not modules_of(smp) & NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"state", "__version__"}))
def test_every_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(smp, name))
