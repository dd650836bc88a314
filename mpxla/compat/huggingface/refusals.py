"""Options of `TrainingArguments` that cannot work with a pipeline, and what to do instead."""

from types import ModuleType
from typing import Any

from mpxla.compat import CompatError
from mpxla.compat.patching import Patches
from mpxla.log import warn_once
from mpxla.user_lines import at_script_line

__all__ = ["patch_arguments"]

_OTHER_WRAPPER = "the pipeline wraps the model already; leave it out, --stages divides the model"
_REFUSED = {
    "torch_compile": "steps are captured and compiled by XLA anyway; leave it out",
    "fsdp": _OTHER_WRAPPER,
    "deepspeed": _OTHER_WRAPPER,
    "parallelism_config": _OTHER_WRAPPER,
    "auto_find_batch_size": "a pipeline cannot go on after it has run out of memory; set "
    "per_device_train_batch_size, or give more --microbatches",
    "use_liger_kernel": "its kernels are for CUDA devices; leave it out, XLA fuses by itself",
}
_WITHIN_BACKWARD = ("lomo", "adalomo", "layerwise")
"""Optimizers that update while gradients are computed."""


def patch_arguments(module: ModuleType, patches: Patches) -> None:
    """`transformers.training_args`: refuses options, and leaves the model to the pipeline."""
    arguments = module.TrainingArguments

    def check_and_complete(self: Any) -> None:
        _check(self)
        # Arguments made inside a trainer (sentence-transformers) take the processes as configured.
        module.PartialState()
        complete(self)

    complete = patches.replace(arguments, "__post_init__", check_and_complete)
    patches.replace(arguments, "place_model_on_device", property(lambda self: False))
    patches.replace(module, "is_torch_bf16_gpu_available", lambda: True)  # XLA devices have it


def _check(arguments: Any) -> None:
    problems = [
        f"{name}={getattr(arguments, name)!r}: {remedy}"
        for name, remedy in _REFUSED.items()
        if getattr(arguments, name, None)
    ]
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if any(part in optimizer for part in _WITHIN_BACKWARD):
        problems.append(
            f"optim={optimizer!r}: it updates parameters while gradients are computed, which a "
            f"step function cannot do; use another one, such as adamw_torch"
        )
    if problems:
        raise CompatError(
            f"{at_script_line()}: TrainingArguments that do not go with a pipeline: "
            f"{'; '.join(problems)}."
        )
    if getattr(arguments, "use_cpu", None):
        arguments.use_cpu = False
        text = "use_cpu=True has no effect: PJRT_DEVICE chooses the device."
        warn_once("TrainingArguments.use_cpu", text)
    arguments.dataloader_pin_memory = False  # XLA reads host memory as it is
