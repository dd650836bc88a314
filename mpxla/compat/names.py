"""What becomes of SMP's and CUDA's names under the launcher, as tables.

The one place that says it: the alias package, the mapping of CUDA, `--check` and
`docs/migrating.md` follow these tables. This module must not import torch.
"""

from enum import StrEnum
from typing import NamedTuple

import mpxla

__all__ = [
    "BACKEND_FLAG",
    "CUDA_AMP_NAMES",
    "CUDA_NAMES",
    "CUDA_NVTX_NAMES",
    "IS_CUDA_TYPE",
    "METHODS",
    "REFUSED",
    "SMP_MODULES",
    "SMP_PACKAGE",
    "SMP_VERSION",
    "TRANSLATIONS",
    "UNKNOWN",
    "Fate",
    "Name",
    "cuda_name",
    "smp_name",
]

SMP_PACKAGE = "smdistributed.modelparallel.torch"
SMP_VERSION = "1.15.0"
"""The version of SMP whose API is followed; scripts compare it."""


class Fate(StrEnum):
    """What happens to a name."""

    SUPPORTED = "supported"
    IDLE = "no effect"
    DIFFERS = "differs"
    REFUSED = "not supported"


class Name(NamedTuple):
    """What happens to one name, and why or how."""

    fate: Fate
    text: str = ""


def _supported(text: str = "") -> Name:
    return Name(Fate.SUPPORTED, text)


def _refused(text: str) -> Name:
    return Name(Fate.REFUSED, text)


# --- SMP --------------------------------------------------------------------------------------


_MODULE = _supported("a module")
_TRANSLATION = _supported("gives the state dict as it is: models keep their own names")
_HOOKS = _refused(
    "hooks that put SMP's own layers into a model; remove the call: smp.set_tensor_parallelism "
    "splits models of transformers as they are"
)

_SWITCHES = {
    **dict.fromkeys(("amp", "nn", "optimizers", "patches", "model"), _MODULE),
    "sharded_data_parallel_checkpoint": _MODULE,
    "model_creation": _supported(),
    "delay_param_initialization": _supported(),
    "set_tensor_parallelism": _supported("splits models of transformers, with their values"),
    "register_parameter": Name(Fate.IDLE, "what a step reads is gathered, whoever owns it"),
}
_SCALER = _supported("loss scaling over all ranks")
_LAYERS = (
    *("DistributedModule", "DistributedLinear", "DistributedEmbedding", "DistributedTransformer"),
    *("DistributedTransformerLMHead", "DistributedTransformerLayer", "DistributedAttentionLayer"),
    *("DistributedTransformerOutputLayer", "FlashAttentionLayer"),
)
TRANSLATIONS = {
    "gpt2": ("translate_state_dict_to_hf_gpt2", "translate_hf_state_dict_to_smdistributed_gpt2"),
    "bert": ("translate_state_dict_to_hf_bert", "translate_hf_state_dict_to_smdistributed_bert"),
    "roberta": (
        "translate_state_dict_to_hf_roberta",
        "translate_hf_state_dict_to_smdistributed_roberta",
        "translate_state_dict_to_smdistributed",
    ),
    "gptj": (
        "translate_state_dict_to_hf_gptj",
        "translate_hf_state_dict_to_smdistributed_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    ),
    "gptneo": (
        "translate_state_dict_to_hf_gptneo",
        "translate_hf_state_dict_to_smdistributed_gptneo",
    ),
}
"""Module below `nn.huggingface` -> its functions between names of transformers and of SMP."""

_FUSED = _supported("a plain optimizer, whose update XLA fuses")
UNKNOWN = _refused("mpxla knows no such name of SMP; remove the use, importing it does no harm")
"""What becomes of a name below SMP's package that no table lists."""

SMP_MODULES: dict[str, dict[str, Name]] = {
    "": {name: _supported() for name in mpxla.__all__} | _SWITCHES,
    "amp": {"GradScaler": _SCALER},
    "nn": {name: _supported() for name in _LAYERS}
    | {"FusedLayerNorm": _supported("torch.nn.LayerNorm"), "huggingface": _MODULE},
    "model": {"DistributedModel": _supported()},
    "nn.huggingface": {family: _MODULE for family in TRANSLATIONS},
    **{
        f"nn.huggingface.{family}": dict.fromkeys(names, _TRANSLATION)
        | ({"get_hf_gpt2_transformer_layer_hooks": _HOOKS} if family == "gpt2" else {})
        for family, names in TRANSLATIONS.items()
    },
    "optimizers": dict.fromkeys(("FusedLamb", "FusedLAMB", "FusedNovoGrad"), _FUSED),
    "sharded_data_parallel_checkpoint": {
        "get_full_state_dict_from_sharded_data_parallel_checkpoint": _supported()
    },
    "patches": {"checkpoint": _MODULE},
    "patches.checkpoint": {name: _supported() for name in ("checkpoint", "checkpoint_sequential")},
}
"""Module below `SMP_PACKAGE` -> name in it -> what happens to it."""

METHODS: dict[str, Name] = {
    **{
        name: _supported()
        for name in (
            *("local_parameters", "local_named_parameters", "local_buffers", "local_named_buffers"),
            *("local_modules", "local_named_modules", "local_state_dict", "get_module"),
            *("register_post_partition_hook", "register_post_step_hook", "reduce_mean"),
            *("reduce_sum", "orig_state_dict", "save_optimizer_backcompat"),
            *("load_optimizer_backcompat", "clip_master_grads", "distributed_modules"),
            *("is_distributed_parameter", "is_distributed_buffer", "is_scaled_batch_parameter"),
            *("is_scaled_batch_buffer", "default_reducer_named_parameters"),
            "scaled_batch_reducer_named_parameters",
        )
    },
    **{n: _supported("an error without fp16: True") for n in ("overflow", "loss_scale")},
    "_global_grad_norm": _supported("an error without sharded_data_parallel_degree"),
}
"""Methods and attributes of `DistributedModel`, `DistributedOptimizer` and `StepOutput` whose names
are theirs alone."""


def smp_name(path: str) -> Name:
    """What happens to a dotted path below the package, such as `nn.DistributedLinear`."""
    module, _, name = path.rpartition(".")
    if path in SMP_MODULES:
        return _MODULE
    while module and module not in SMP_MODULES:  # an attribute of a name: smp.state.cfg
        module, _, name = module.rpartition(".")
    names = SMP_MODULES[module]
    if name in names:
        return names[name]
    # An inner module that no table lists, such as `state_mod`: it has the names of the package.
    inner = path.split(".")[1:2]
    return SMP_MODULES[""].get(inner[0], UNKNOWN) if inner and not module else UNKNOWN


# --- CUDA -------------------------------------------------------------------------------------

_STREAM = "XLA runs work in the order of the program, which every stream is"
_CUDA_STREAM = "it wraps a stream of CUDA's runtime; use torch.cuda.Stream and torch.cuda.stream"
_RANGE = "NVIDIA's profiler, which shows such ranges, does not see XLA devices"
_MEMORY = "bytes that the device's runtime counts; on the CPU, resident bytes of the process"
_GRAPHS = "step functions are captured and compiled anyway; remove it"
_RANDOM = (
    "random numbers of step functions, and of the device; on jax on the CPU, what is drawn outside "
    "of steps comes from the host's generator, which `torch.manual_seed` seeds"
)
_ALLOCATOR = "XLA's runtime has its own allocator, which scripts cannot steer"
BACKEND_FLAG = Name(Fate.IDLE, "a flag of CUDA's libraries")
"""Everything in `torch.backends.cuda` and `torch.backends.cudnn`."""
IS_CUDA_TYPE = Name(Fate.DIFFERS, "False: the type of the script's device is 'xla', or 'cpu'")
"""Comparing a device's text, as in `device.type == "cuda"`: nothing can map it, so the launcher
warns."""
REFUSED = "it says something about a CUDA device that an XLA device does not have"
"""Reason for names of `torch.cuda` that no table lists."""

CUDA_NAMES: dict[str, Name] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _supported("True")),
    "device_count": _supported("number of processes on this host"),
    "current_device": _supported("the local rank"),
    "set_device": _supported("checks the index; every process has one device"),
    "device": _supported("a context; checks the index"),
    "get_device_name": _supported("type of the XLA device"),
    "get_device_properties": _supported("name and total_memory"),
    "synchronize": _supported("runs pending work and waits for it"),
    **{
        name: _supported(_RANDOM)
        for name in (
            *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
            *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
        )
    },
    **{
        name: _supported(_MEMORY)
        for name in (
            *("memory_allocated", "max_memory_allocated", "memory_reserved"),
            *("max_memory_reserved", "memory_cached", "max_memory_cached", "mem_get_info"),
            *("memory_stats", "memory_summary"),
            *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        )
    },
    "init": Name(Fate.IDLE, "the device is there"),
    "empty_cache": Name(Fate.IDLE, _ALLOCATOR),
    "ipc_collect": Name(Fate.IDLE, _ALLOCATOR),
    "amp": _MODULE,
    **dict.fromkeys(
        ("random", "memory", "streams"), _supported("a module with names of torch.cuda")
    ),
    "nvtx": _MODULE,
    "Event": _supported("recorded when the work before it is done; its times are those of work"),
    **{
        name: _supported(_STREAM)
        for name in ("Stream", "stream", "set_stream", "current_stream", "default_stream")
    },
    "ExternalStream": _refused(_CUDA_STREAM),
    "StreamContext": _refused(_CUDA_STREAM),
    **{
        name: _refused(_GRAPHS)
        for name in ("CUDAGraph", "graph", "graphs", "make_graphed_callables", "graph_pool_handle")
    },
    **{
        name: _refused(_ALLOCATOR)
        for name in (
            *("set_per_process_memory_fraction", "memory_snapshot", "MemPool", "use_mem_pool"),
            *("caching_allocator_alloc", "caching_allocator_delete", "CUDAPluggableAllocator"),
            "change_current_allocator",
        )
    },
    "nccl": _refused("processes talk through mpxla; use smp's or torch.distributed's functions"),
    "profiler": _refused("NVIDIA's profiler does not see XLA devices; remove it"),
    "cudart": _refused("there is no CUDA runtime; remove it"),
    "_lazy_init": _refused(
        "torch asks for a CUDA device here; CUDA devices mean the XLA device on the thread that "
        "runs the script only"
    ),
    "get_device_capability": _refused("an XLA device has no compute capability"),
    **{
        f"{kind}{what}": _refused(
            "use torch.tensor(..., device='cuda') and tensor.dtype in its place"
        )
        for kind in ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Byte", "Bool")
        for what in ("Tensor", "Storage")
    },
}
"""Name in `torch.cuda` -> what happens to it."""

CUDA_AMP_NAMES: dict[str, Name] = {
    "autocast": _supported("the device's autocast; without dtype, bfloat16"),
    "GradScaler": _SCALER,
    "autocast_mode": _supported("a module with names of torch.cuda.amp"),
    "grad_scaler": _supported("a module with names of torch.cuda.amp"),
}
"""Name in `torch.cuda.amp` -> what happens to it."""

CUDA_NVTX_NAMES: dict[str, Name] = {
    name: Name(Fate.IDLE, _RANGE)
    for name in ("range", "range_push", "range_pop", "range_start", "range_end", "mark")
}
"""Name in `torch.cuda.nvtx` -> what happens to it."""

_NAMES_IN: dict[str, dict[str, Name]] = {
    **dict.fromkeys(("", "random", "memory", "streams"), CUDA_NAMES),
    **dict.fromkeys(("amp", "amp.autocast_mode", "amp.grad_scaler"), CUDA_AMP_NAMES),
    "nvtx": CUDA_NVTX_NAMES,
}
"""Module below `torch.cuda` -> the names that are found in it."""


def cuda_name(path: str) -> Name:
    """What happens to a dotted path below `torch.cuda`, such as `amp.autocast`."""
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):  # the longest module; then an attribute's owner
        names = _NAMES_IN.get(".".join(parts[:length]))
        if names is not None:
            return names.get(parts[length], _refused(REFUSED))
    raise AssertionError("torch.cuda itself has a table")
