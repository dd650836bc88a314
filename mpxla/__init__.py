"""mpxla: model-parallel training of PyTorch models on XLA devices, with SMP's API.

Names are resolved when they are first used, so that the parts that need no device (schedules,
topology, partitioner, command line) import without torch or torch_xla.
"""

from typing import TYPE_CHECKING, Any

from mpxla.collection import collection_paused
from mpxla.env import prepare_xla

__version__ = "0.1.0"

prepare_xla()  # before the first use of a device, which may come before smp.init()

_SOURCES = {
    "mpxla.api": (
        "allgather", "barrier", "broadcast", "dp_barrier", "dp_rank", "dp_size", "get_dp_group",
        "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_pp_group",
        "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group",
        "get_tp_process_group", "get_world_process_group", "is_tracing", "local_rank",
        "local_size", "mp_barrier", "mp_rank", "mp_size", "num_microbatches", "pp_rank",
        "pp_size", "rank", "rdp_rank", "rdp_size", "recv_from", "send", "size", "state",
        "tp_rank", "tp_size",
    ),
    "mpxla.checkpoint.load": ("resume_from_checkpoint",),
    "mpxla.checkpoint.save": ("save_checkpoint",),
    "mpxla.checkpoint.single": ("load", "save"),
    "mpxla.errors": (
        "CaptureError", "CheckpointError", "ConfigError", "LoweringError", "MpxlaError",
        "PartitionError", "PeerFailure", "RankMismatch", "ScheduleError", "StepError",
        "TopologyError",
    ),
    "mpxla.nn.distribute": ("set_tensor_parallelism", "tensor_parallelism"),
    "mpxla.nn.registry": ("tp_register", "tp_register_with_module"),
    "mpxla.parallel.checkpointing": ("set_activation_checkpointing",),
    "mpxla.parallel.creation": (
        "delay_param_initialization", "model_creation", "register_parameter",
    ),
    "mpxla.parallel.model": ("DistributedModel",),
    "mpxla.parallel.gradients.norms": ("clip_grad_norm_",),
    "mpxla.parallel.optimizer": ("DistributedOptimizer",),
    "mpxla.parallel.tags": ("partition", "set_partition"),
    "mpxla.runtime.watching.debug": ("debug_print",),
    "mpxla.runtime.watching.metrics": ("metrics", "write_metrics"),
    "mpxla.runtime.outputs": ("StepOutput",),
    "mpxla.runtime.watching.profile": ("profile",),
    "mpxla.runtime.step": ("step",),
    "mpxla.session": ("init", "is_initialized", "shutdown"),
    "mpxla.topology": ("CommGroup", "RankType"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _SOURCES.items() for name in names}
_MODULES = ("amp", "nn", "patches", "sharded_data_parallel_checkpoint")
_GROUPS = ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP")

# pyright cannot evaluate the list; what it tells readers is at the end.
__all__ = [*_MODULE_OF, *_GROUPS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    with collection_paused():
        if name in _GROUPS:
            value = import_module("mpxla.topology").CommGroup[name]
        elif name in _MODULES:
            value = import_module(f"mpxla.{name}")
        elif name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module 'mpxla' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from mpxla import amp as amp
    from mpxla import sharded_data_parallel_checkpoint as sharded_data_parallel_checkpoint
    from mpxla.api import *  # noqa: F403
    from mpxla.checkpoint.load import resume_from_checkpoint as resume_from_checkpoint
    from mpxla.checkpoint.save import save_checkpoint as save_checkpoint
    from mpxla.checkpoint.single import load as load
    from mpxla.checkpoint.single import save as save
    from mpxla.errors import CaptureError as CaptureError
    from mpxla.errors import CheckpointError as CheckpointError
    from mpxla.errors import ConfigError as ConfigError
    from mpxla.errors import LoweringError as LoweringError
    from mpxla.errors import MpxlaError as MpxlaError
    from mpxla.errors import PartitionError as PartitionError
    from mpxla.errors import PeerFailure as PeerFailure
    from mpxla.errors import RankMismatch as RankMismatch
    from mpxla.errors import ScheduleError as ScheduleError
    from mpxla.errors import StepError as StepError
    from mpxla.errors import TopologyError as TopologyError
    from mpxla.nn.distribute import set_tensor_parallelism as set_tensor_parallelism
    from mpxla.nn.distribute import tensor_parallelism as tensor_parallelism
    from mpxla.nn.registry import tp_register as tp_register
    from mpxla.nn.registry import tp_register_with_module as tp_register_with_module
    from mpxla.parallel.checkpointing import (
        set_activation_checkpointing as set_activation_checkpointing,
    )
    from mpxla.parallel.creation import delay_param_initialization as delay_param_initialization
    from mpxla.parallel.creation import model_creation as model_creation
    from mpxla.parallel.creation import register_parameter as register_parameter
    from mpxla.parallel.gradients.norms import clip_grad_norm_ as clip_grad_norm_
    from mpxla.parallel.model import DistributedModel as DistributedModel
    from mpxla.parallel.optimizer import DistributedOptimizer as DistributedOptimizer
    from mpxla.parallel.tags import partition as partition
    from mpxla.parallel.tags import set_partition as set_partition
    from mpxla.runtime.outputs import StepOutput as StepOutput
    from mpxla.runtime.step import step as step
    from mpxla.runtime.watching.debug import debug_print as debug_print
    from mpxla.runtime.watching.metrics import metrics as metrics
    from mpxla.runtime.watching.metrics import write_metrics as write_metrics
    from mpxla.runtime.watching.profile import profile as profile
    from mpxla.session import init as init
    from mpxla.session import is_initialized as is_initialized
    from mpxla.session import shutdown as shutdown
    from mpxla.topology import CommGroup as CommGroup
    from mpxla.topology import RankType as RankType

    WORLD: CommGroup
    MP_GROUP: CommGroup
    DP_GROUP: CommGroup
    PP_GROUP: CommGroup
    TP_GROUP: CommGroup
    RDP_GROUP: CommGroup
