"""What `Trainer` does with a model, by step functions.

transformers' own branches for SMP leave out what its plain code has learned since (the loss of the
trainer, numbers of items, an optimizer at all), so `trainer.py` is told that there is no SMP, and
the methods here replace those of its plain code that touch the model.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree

import mpxla
from mpxla.compat import CompatError
from mpxla.compat.devices import device_backend
from mpxla.compat.huggingface import steps
from mpxla.compat.huggingface.batches import Batch, cut_batch, num_rows_of
from mpxla.compat.huggingface.checks import check_loss, joined
from mpxla.compat.huggingface.metrics import OutsideOfSteps, Played, in_place_of, loss_of
from mpxla.compat.huggingface.saving import load_from_checkpoint
from mpxla.compat.huggingface.texts import with_tokens
from mpxla.compat.patching import Patches
from mpxla.graph.exchanged import exchanged
from mpxla.log import get_logger
from mpxla.parallel.gradients.grad_scaler import GradScaler
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.optimizer import DistributedOptimizer
from mpxla.parallel.state_dicts import to_host
from mpxla.runtime.outputs import StepOutput

__all__ = ["compute_outside", "patch_training", "shifts_by_default"]

_WHOLE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Trainers that have run a step, and whether their batches are not cut."""
_ROWS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Rows per example of each trainer's batches."""
_CACHES = ["past_key_values", "cache"]
"""What models call their caches of keys and values: until transformers 5.23, and from 5.24 on."""


def patch_training(module: ModuleType, patches: Patches) -> None:
    """`transformers.trainer`: wrapping, steps."""
    trainer = module.Trainer
    # Its branches for SMP are of no use; see the head of this file.
    patches.replace(module, "is_sagemaker_mp_enabled", lambda: False)
    patches.replace(trainer, "_wrap_model", _wrap_model)
    patches.replace(trainer, "_prepare_for_training", _prepare_for_training)
    patches.replace(trainer, "_prepare_input", lambda self, data: data)  # a step moves its inputs
    patches.replace(trainer, "training_step", _training_step)
    patches.replace(trainer, "prediction_step", _prediction_step)
    patches.replace(trainer, "is_world_process_zero", lambda self: mpxla.rank() == 0)
    make = patches.replace(
        trainer,
        "create_accelerator_and_postprocess",
        lambda self: _make_accelerator(self, make),
    )


def _make_accelerator(trainer: Any, make: Any) -> None:
    with exchanged(trainer.args, mixed_precision="no"):
        make(trainer)  # it would refuse half precision on this device; steps have it by themselves
    accelerator = trainer.accelerator
    accelerator.device_placement = False  # a step moves its inputs
    if trainer.args.fp16:  # what it does on CUDA: with these, it unscales, skips and saves
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.scaler = GradScaler()


def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
    """Wraps the trainer's model once, for training and evaluation."""
    wrapped = self.model_wrapped
    if isinstance(model, DistributedModel):
        return model
    if not isinstance(wrapped, DistributedModel) or wrapped.module is not model:
        passes = self.args.gradient_accumulation_steps
        wrapped = self.model_wrapped = DistributedModel(
            model, backward_passes_per_step=passes, average_grads_across_microbatches=False
        )
    return wrapped


def _prepare_for_training(
    self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
) -> tuple[Any, Any]:
    """Wraps model and optimizer, makes the scheduler, loads what training resumes from."""
    if self._created_lr_scheduler:  # of an earlier call; its settings may be others now
        self.lr_scheduler = None
        self._created_lr_scheduler = False
    model = self._wrap_model(self.model_wrapped)
    self._mixed_mesh_grads = False  # found out after the first step, it would compile all anew
    self.create_optimizer()
    if not isinstance(getattr(self.optimizer, "optimizer", None), DistributedOptimizer):
        self.optimizer = self.accelerator.prepare(DistributedOptimizer(self.optimizer))
    self.create_scheduler(num_training_steps=max_steps)
    if resume_from_checkpoint is not None:
        load_from_checkpoint(self, resume_from_checkpoint)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
    for name in ("model", "optimizer", "lr_scheduler"):
        setattr(self.callback_handler, name, getattr(self, name))
    self.callback_handler.train_dataloader = train_dataloader
    return model, train_dataloader


def _training_step(
    self: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
) -> torch.Tensor:
    """Forward and backward of one batch. Returns its loss, as the plain method does."""
    model.train()
    if callable(getattr(self.optimizer, "train", None)):
        self.optimizer.train()
    inputs = self._prepare_inputs(inputs)
    is_scaled = self.loss_is_scaled_for_ga
    if is_scaled is None:
        is_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        is_scaled = is_counted or self.compute_loss_func is not None

    def step(batch: Batch) -> Any:
        if not is_scaled:
            batch.weights.div_(self.current_gradient_accumulation_steps)
        if self.accelerator.sync_gradients:
            model.reduce_next_step()  # the last batches of an epoch may be fewer than accumulated
        return steps.train(model, self, batch, num_items_in_batch is not None)

    batch, (loss, recorded) = _run(self, model, inputs, num_items_in_batch, step, is_training=True)
    _take_metrics(self, recorded, batch, num_items_in_batch)
    return loss.reduce_sum().to(self.args.device)


def _run(
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    num_items: Any,
    step: Callable[[Batch], Any],
    *,
    is_training: bool,
) -> tuple[Batch, Any]:
    """A batch as it is cut, and what a step gives for it."""
    inputs, is_whole = with_tokens(trainer, inputs)
    if is_whole:
        _WHOLE[trainer] = True
    batch = _cut(trainer, inputs, num_items, is_training=is_training)
    found = step(batch)
    if _becomes_whole(trainer, batch, num_items):
        if is_training:
            model.zero_grad()  # it was the first step
        batch = _cut(trainer, inputs, num_items, is_training=is_training)
        found = step(batch)
    return batch, found


def _cut(trainer: Any, inputs: dict[str, Any], num_items: Any, *, is_training: bool) -> Batch:
    return cut_batch(
        inputs,
        mpxla.state.cfg.microbatches,
        num_items,
        is_shifted=trainer._loss_shifts_labels or shifts_by_default(trainer.model),
        is_training=is_training,
        rows_per_example=_rows_per_example(trainer, inputs, is_training),
        is_whole=_WHOLE.get(trainer, False),
    )


def _rows_per_example(trainer: Any, inputs: dict[str, Any], is_training: bool) -> int:
    """By the first batch that is full: the last of an epoch does not tell."""
    if trainer in _ROWS:
        return _ROWS[trainer]
    args = trainer.args
    size = trainer._train_batch_size if is_training else args.per_device_eval_batch_size
    if is_training and hasattr(trainer.train_dataset, "__len__"):
        size = min(size, len(trainer.train_dataset))
    found, rest = divmod(num_rows_of(inputs), size)
    if rest or not found:
        return 1
    _ROWS[trainer] = found
    return found


def _own_compute_loss(trainer: Any) -> Any:
    compute = trainer.compute_loss
    return compute.own if isinstance(compute, OutsideOfSteps) else compute


def _becomes_whole(trainer: Any, batch: Batch, num_items: Any) -> bool:
    """Whether a batch has to run again, in one microbatch, as all of the trainer's from now on.

    That is for losses that are not the mean of those of microbatches. All ranks call it after their
    first step, and agree; what later steps find is an error.

    Raises:
        CompatError: steps cannot compute the loss, or they have computed others so far.
    """
    plain = sys.modules["transformers.trainer"].Trainer.compute_loss
    is_own = getattr(_own_compute_loss(trainer), "__func__", None) is not plain
    if not is_own and trainer.compute_loss_func is None:
        return False
    problem = check_loss(trainer, batch, num_items)
    if trainer not in _WHOLE:
        problems = mpxla.allgather(problem, mpxla.WORLD)
        problem = next(filter(None, problems), None)
        _WHOLE[trainer] = problem is not None
        if problem is not None and mpxla.rank() == 0:
            get_logger().warning(
                "%s. From now on one microbatch has the whole batch, and the others repeat it "
                "without weight: train with --microbatches 1, which computes the same in less time",
                problem,
            )
        return _WHOLE[trainer]
    if problem is not None:
        raise CompatError(f"{problem}. Train with --microbatches 1.")
    return False


def shifts_by_default(model: Any) -> bool:
    """Whether a model has the causal loss because transformers knows no loss by its name.

    GPT-2 has, for one. `Trainer` does not take such losses for shifted ones.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    if getattr(model, "loss_type", None) is not None:
        return False
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def _prediction_step(
    self: Any,
    model: Any,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> tuple[torch.Tensor | None, Any, Any]:
    """Evaluates one batch. Returns loss, predictions and labels on the host."""
    inputs = self._prepare_inputs(inputs)
    names = self.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    returns_loss = inputs.get("return_loss")
    returns_loss = self.can_return_loss if returns_loss is None else returns_loss
    has_loss = has_labels or (not names and returns_loss)
    if ignore_keys is None:
        config = getattr(self.model, "config", None)
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", _CACHES)
    ignored = tuple(ignore_keys) if ignore_keys else ()
    labels = tuple(inputs.get(name) for name in names) if has_loss else None
    if has_loss:
        count = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        kept = None if prediction_loss_only else ignored
        loss, outputs = _evaluated(self, model, inputs, count, kept)
    else:
        batch = _cut(self, inputs, None, is_training=False)
        with torch.no_grad():
            outputs, loss = _joined(steps.predict(model, self, batch, ignored), batch), None
    if prediction_loss_only:
        return loss, None, None
    return loss, _only(outputs), to_host(_only(labels), device_backend())


def _evaluated(
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    num_items: Any,
    kept: tuple[str, ...] | None,
    with_names: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Loss of a batch, and the outputs that are wanted, on the host."""

    def step(batch: Batch) -> Any:
        return steps.evaluate(model, trainer, batch, num_items is not None, kept, with_names)

    with torch.no_grad():
        batch, found = _run(trainer, model, inputs, num_items, step, is_training=False)
    losses, outputs, recorded = found
    _take_metrics(trainer, recorded, batch, num_items)
    return to_host(losses.reduce_sum(), device_backend()), _joined(outputs, batch)


class _Named(dict[str, Any]):
    """Outputs of a model that are asked for as attributes or as items."""

    __getattr__ = dict.get


def compute_outside(
    self: Any,
    model: Any,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """`compute_loss` of a `prediction_step` of the trainer's own: evaluates one batch."""
    kept = () if return_outputs else None
    loss, outputs = _evaluated(self, model, inputs, num_items_in_batch, kept, return_outputs)
    if not return_outputs:
        return loss
    return loss, _Named(outputs) if isinstance(outputs, dict) else outputs


def _take_metrics(trainer: Any, recorded: list[Any], batch: Batch, num_items: Any) -> None:
    """Plays `compute_loss` for what it does beside the loss; see `metrics`."""
    if not recorded:
        return
    played = Played(trainer.model, [_joined(outputs, batch) for outputs in recorded])
    with torch.no_grad(), in_place_of(trainer.model, played, trainer):
        loss_of(played, _own_compute_loss(trainer), batch.inputs, num_items)


def _joined(outputs: Any, batch: Batch) -> Any:
    """Outputs of all microbatches as those of the batch, on the host."""

    def join(output: Any) -> Any:
        if not isinstance(output, StepOutput):
            return output
        return joined(to_host(output.outputs[: batch.num_real], device_backend()), batch)

    return pytree.tree_map(join, outputs)


def _only(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
