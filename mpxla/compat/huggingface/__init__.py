"""Lets scripts that use Hugging Face's `Trainer` run as pipelines, unedited.

    torchrun --nproc_per_node 2 -m mpxla.compat --stages 2 --microbatches 4 script.py ...

transformers knows SMP: told so by variables (`settings.py`), `Trainer` wraps model and optimizer
for it. That part of transformers has not kept up with the rest, so the launcher replaces it when
the script imports transformers, in these places only: `processes.py` (accelerate's idea of the
processes), `training.py` (steps), `saving.py` (checkpoints), `refusals.py` (options that cannot
work). `patching.py` undoes all of it at the end of the script. Nothing here imports transformers
before the script does.
"""

import contextlib
from collections.abc import Generator
from types import ModuleType

from mpxla.compat.patching import Patches, patched_on_import

__all__ = ["speaks_trainer"]


@contextlib.contextmanager
def speaks_trainer() -> Generator[None]:
    """Replaces what a pipeline needs of transformers and accelerate, until exit."""
    from mpxla.compat.huggingface import generation, processes, refusals, saving, training

    def patch_trainer(module: ModuleType, patches: Patches) -> None:
        training.patch_training(module, patches)
        saving.patch_saving(module, patches)
        generation.patch_evaluation(module, patches)

    with patched_on_import(
        {
            "accelerate.state": processes.patch_state,
            "accelerate.utils.operations": processes.patch_operations,
            "accelerate.accelerator": processes.patch_accelerator,
            "accelerate.optimizer": processes.patch_optimizer,
            "transformers.modeling_utils": saving.patch_models,
            "transformers.training_args": refusals.patch_arguments,
            "transformers.trainer": patch_trainer,
            "transformers.trainer_seq2seq": generation.patch_generation,
        }
    ):
        yield
