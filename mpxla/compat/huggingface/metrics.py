"""Metrics that a trainer's `compute_loss` takes beside the loss, as TRL's trainers do.

A step function is captured once, so what `compute_loss` reads and stores in it would happen once.
There, it works on a shadow of the trainer, which keeps to itself what it stores, and whose
collective calls give nothing. If there was one, the outputs of the model leave the step, and
`compute_loss` is played again on the host with them, for what it does beside the loss.
"""

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.compat import CompatError
from mpxla.compat.cuda import Autocast
from mpxla.graph.exchanged import restored
from mpxla.parallel.model import DistributedModel
from mpxla.user_lines import at_script_line

__all__ = [
    "TOKENS",
    "OutsideOfSteps",
    "Played",
    "Recording",
    "computed",
    "depends_on_others",
    "in_place_of",
    "loss_of",
    "shadow_of",
]

_DEPTH = 3
_GATHERS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


TOKENS = "tokens of mpxla"
"""The name among inputs of what `model.preprocess` gives, call after call; see `texts`."""


class _StandIn:
    """What a `Trainer` takes for its model, and asks for the attributes of the model.

    Args:
        model: the user's model, wrapped or not.
    """

    def __init__(self, model: Any):
        self._model = model

    def _get_name(self) -> str:
        """Of the user's class: label smoothing knows by it whether to shift labels."""
        model = getattr(self._model, "module", self._model)
        if callable(base := getattr(model, "get_base_model", None)):  # of PEFT
            model = base()
        return type(model).__name__

    def __getattr__(self, name: str) -> Any:
        model = self._model
        return getattr(model if hasattr(model, name) else getattr(model, "module", model), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # which a loss may have replaced, as of a module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def loss_of(
    stand_in: _StandIn, compute_loss: Any, inputs: Mapping[str, Any], num_items: Any, **options: Any
) -> Any:
    """What a `compute_loss` gives with a stand-in, which has the tokens that are in the inputs."""
    inputs = dict(inputs)
    if (tokens := inputs.pop(TOKENS, None)) is not None:
        given = iter(tokens)
        vars(stand_in)["preprocess"] = lambda *args, **kwargs: dict(next(given))
    return compute_loss(stand_in, inputs, num_items_in_batch=num_items, **options)


class Recording(_StandIn):
    """Stands for the model in a captured `compute_loss`, and keeps its outputs.

    Args:
        model: the model.
        args: the `TrainingArguments`. With `bf16` or `fp16`, its forward is under autocast and
            gives float32, as in a plain `Trainer`: parameters, gradients and what follows the model
            stay float32.
    """

    def __init__(self, model: Any, args: Any):
        super().__init__(model)
        self._is_mixed = args.bf16 or args.fp16
        self._half = torch.float16 if args.fp16 else torch.bfloat16
        self.outputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        with Autocast(self._is_mixed, self._half):
            found = self._model(*args, **kwargs)
        if self._is_mixed:
            found = pytree.tree_map(_widened, found)
        self.outputs.append(pytree.tree_map(_detached, found))
        return found


def computed(
    trainer: Any,
    recording: Recording,
    inputs: Mapping[str, Any],
    num_items: Any = None,
    **options: Any,
) -> tuple[Any, bool]:
    """What `compute_loss` gives in a captured step, and whether it takes metrics.

    Raises:
        CompatError: the loss depends on other processes.
    """
    shadow, accelerator = shadow_of(trainer)
    try:
        with in_place_of(trainer.model, recording, trainer):
            found = loss_of(recording, shadow.compute_loss, inputs, num_items, **options)
        if isinstance(found[0] if isinstance(found, tuple) else found, _Nothing):
            raise TypeError(_Nothing.__name__)
    except TypeError as error:
        if _Nothing.__name__ not in str(error):
            raise
        raise depends_on_others(trainer) from error
    return found, accelerator.was_asked


def depends_on_others(trainer: Any, detail: str = "") -> CompatError:
    """The error of a loss that steps cannot compute."""
    return CompatError(
        f"{at_script_line()}: the loss of {type(trainer).__name__} depends on what "
        f"accelerator.gather or a method like it gives, which step functions cannot ask other "
        f"processes for{detail}: use a loss without it (for TRL's KTOTrainer, another loss_type)."
    )


class Played(_StandIn):
    """Stands for the model on the host: gives the outputs that it had, call after call."""

    def __init__(self, model: nn.Module, outputs: list[Any]):
        super().__init__(model)
        self._outputs = list(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The next outputs, whatever the arguments, in containers that may be written to."""
        return pytree.tree_map(lambda value: value, self._outputs.pop(0))


class OutsideOfSteps:
    """A trainer's `compute_loss` that runs a step function, for what it calls by itself.

    Args:
        compute: the method.
        trainer: the trainer, which has this one until `remove`.
    """

    def __init__(self, compute: Callable[..., Any], trainer: Any):
        self._compute, self._trainer = compute, trainer
        self._replaced = {k: v for k, v in vars(trainer).items() if k == "compute_loss"}
        self.own = trainer.compute_loss
        trainer.compute_loss = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, of a model that is called in a step function."""
        return self._compute(self._trainer, *args, **kwargs)

    def remove(self, trainer: Any) -> None:
        """Gives a trainer, or a copy of it, its own again."""
        del trainer.compute_loss
        vars(trainer).update(self._replaced)


class _Silent:
    """An accelerator whose collectives give nothing."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self.was_asked = False

    def __getattr__(self, name: str) -> Any:
        if name not in _GATHERS:
            return getattr(self._accelerator, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            self.was_asked = True
            return _Nothing()

        return answer


class _Nothing:
    """The result of a collective in a captured step: neither positive nor worth anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def item(self) -> float:
        return 0.0

    def tolist(self) -> list[float]:
        return []

    def __bool__(self) -> bool:
        return False

    def _self(self, *others: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _self
    __truediv__ = __rtruediv__ = __gt__ = __ge__ = __lt__ = __le__ = __getitem__ = _self


def shadow_of(trainer: Any) -> tuple[Any, _Silent]:
    """A copy of a trainer that shares what it reads and not what it stores, and its accelerator."""
    shadow = copy.copy(trainer)
    for name, value in vars(trainer).items():
        vars(shadow)[name] = _copied(value, _DEPTH)
    if isinstance(shadow.compute_loss, OutsideOfSteps):
        shadow.compute_loss.remove(shadow)
    shadow.accelerator = _Silent(trainer.accelerator)
    return shadow, shadow.accelerator


@contextlib.contextmanager
def in_place_of(model: Any, stand_in: _StandIn, trainer: Any) -> Generator[None]:
    """Modules of a trainer that hold its model, as losses do, hold the stand-in, until exit."""
    values: list[Any] = []
    for value in vars(trainer).values():
        values += cast(Any, value).values() if isinstance(value, dict) else [value]
    tables = [
        vars(holder)["_modules"]
        for value in values
        if isinstance(value, nn.Module) and not isinstance(value, DistributedModel)
        for holder in value.modules()
    ]
    with restored(*tables):
        for children in tables:
            found = [name for name, child in children.items() if child is model]
            children.update(dict.fromkeys(found, stand_in))
        yield


def _copied(value: Any, depth: int) -> Any:
    """Containers that hold metrics anew, with what is in them."""
    if not depth or not isinstance(value, (dict, list)):
        return value
    other = copy.copy(cast(Any, value))
    for key in list(other) if isinstance(other, dict) else range(len(other)):
        other[key] = _copied(other[key], depth - 1)
    return other


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
