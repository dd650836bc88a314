"""Checkpoints of a `Trainer` in the files and formats of the plain one, which reads them.

All ranks call what gathers the model, and one writes.
"""

import contextlib
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

import mpxla
from mpxla.compat.devices import device_backend
from mpxla.compat.patching import Patches
from mpxla.graph.exchanged import exchanged
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.whole import whole_copy
from mpxla.runtime.seeds import generator_state, set_generator_state
from mpxla.session import current

__all__ = ["load_from_checkpoint", "patch_models", "patch_saving"]

_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"


def patch_saving(module: ModuleType, patches: Patches) -> None:
    """`transformers.trainer`: saving and loading."""
    trainer = module.Trainer
    patches.replace(trainer, "save_model", _save_model)
    patches.replace(trainer, "_load_best_model", _load_best_model)

    def load(self: Any, folder: str, model: Any = None) -> None:
        wrapped = self.model_wrapped
        is_wrapped = isinstance(wrapped, DistributedModel)
        if is_wrapped and module._is_peft_model(self.model):
            wrapped.load_state_dict(_adapter_values(self.model, folder), strict=False)
        else:
            load_plain(self, folder, wrapped if is_wrapped else model)

    load_plain = patches.replace(trainer, "_load_from_checkpoint", load)
    patches.replace(trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    patches.replace(trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    patches.replace(trainer, "_save_rng_state", _save_rng_state)
    patches.replace(trainer, "_load_rng_state", _load_rng_state)


def patch_models(module: ModuleType, patches: Patches) -> None:
    """`transformers.modeling_utils`: names in a state dict are the model's own, always."""
    # Else it translates those of SMP's tensor-parallel layers by functions of SMP.
    patches.replace(module, "IS_SAGEMAKER_MP_POST_1_10", False)


def _save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Saves the whole model for `from_pretrained`. All ranks call it, and rank 0 writes."""
    output_dir = self.args.output_dir if output_dir is None else output_dir
    if _has_own(self, "_save"):  # which need not take the state dict
        with _holding_whole_copy(self):
            if self.args.should_save:
                self._save(output_dir)
    else:
        whole = self.model_wrapped.state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=whole)
    mpxla.barrier()
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _has_own(trainer: Any, name: str) -> bool:
    """Whether the class of a trainer has a method of its own for what a pipeline does otherwise."""
    plain = sys.modules["transformers.trainer"].Trainer
    return getattr(type(trainer), name) is not getattr(plain, name)


@contextlib.contextmanager
def _holding_whole_copy(trainer: Any) -> Generator[nn.Module]:
    """The trainer's model is a copy of the whole one on the host, until exit. All ranks enter."""
    copied = whole_copy(trainer.model_wrapped, current())
    with exchanged(trainer, model=copied):
        yield copied


def load_from_checkpoint(trainer: Any, folder: str) -> None:
    """Loads into the wrapped model, also where the trainer has a way of its own to load."""
    if not _has_own(trainer, "_load_from_checkpoint"):
        trainer._load_from_checkpoint(folder)
        return
    with _holding_whole_copy(trainer) as copied:
        trainer._load_from_checkpoint(folder)
    trainer.model_wrapped.load_state_dict(copied.state_dict())


def _load_best_model(self: Any) -> None:
    load_from_checkpoint(self, self.state.best_model_checkpoint)


def _adapter_values(model: Any, folder: str) -> dict[str, Any]:
    """Values of the model's adapter in a checkpoint, by their names in the model."""
    # The script has imported it; the environment of the checks may not have it.
    from peft import (  # pyright: ignore[reportMissingImports]
        get_peft_model_state_dict,
        load_peft_weights,
    )

    adapter = model.active_adapters[0]
    beside = Path(folder) / adapter  # all but the adapter named "default" have a folder
    live = model.state_dict(keep_vars=True)
    names = {id(value): name for name, value in live.items()}
    saved = get_peft_model_state_dict(model, state_dict=dict(live), adapter_name=adapter)
    values = load_peft_weights(str(beside if beside.is_dir() else folder), device="cpu")
    return {names[id(saved[name])]: value for name, value in values.items()}


def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
    """Saves the states of the plain optimizer and of the scheduler. All ranks call it."""
    state = self.optimizer.state_dict()
    if self.args.should_save:
        torch.save(state, os.path.join(output_dir, _OPTIMIZER))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))


def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
    """Loads them, where the checkpoint has both."""
    if checkpoint is None:
        return
    files = [Path(checkpoint) / name for name in (_OPTIMIZER, _SCHEDULER)]
    if not all(file.is_file() for file in files):
        return
    optimizer, scheduler = (torch.load(f, map_location="cpu", weights_only=True) for f in files)
    self.optimizer.load_state_dict(optimizer)
    self.lr_scheduler.load_state_dict(scheduler)


def _state_file(folder: str) -> Path:
    name = "rng_state.pth" if mpxla.size() == 1 else f"rng_state_{mpxla.rank()}.pth"
    return Path(folder) / name


def _save_rng_state(self: Any, output_dir: str) -> None:
    """Saves this rank's random states: those of the plain file, the device's and the steps'."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "device": device_backend().random_state(),
        "steps": generator_state(),
    }
    torch.save(states, _state_file(output_dir))


def _load_rng_state(self: Any, checkpoint: str | None) -> None:
    """Restores them; a checkpoint of the plain trainer has those of the host."""
    if checkpoint is None or not _state_file(checkpoint).is_file():
        return
    from transformers.trainer_pt_utils import safe_globals  # the script has imported it

    with safe_globals():
        states = torch.load(_state_file(checkpoint), weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "device" in states:
        device_backend().set_random_state(states["device"])
        set_generator_state(states["steps"])
