"""`predict_with_generate` of `Seq2SeqTrainer`: a plain copy of the model generates on the host.

Generation calls the model once per token, with a cache, which is no step function. All ranks of a
replica do the same there, so that all of them have the predictions.
"""

from types import ModuleType
from typing import Any

from mpxla.compat.huggingface.metrics import OutsideOfSteps
from mpxla.compat.huggingface.training import compute_outside
from mpxla.compat.patching import Patches
from mpxla.graph.exchanged import exchanged
from mpxla.log import warn_once
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.whole import whole_copy
from mpxla.session import current

__all__ = ["patch_evaluation", "patch_generation"]

_COPY = "_model_that_generates"


def patch_evaluation(module: ModuleType, patches: Patches) -> None:
    """`transformers.trainer`: each evaluation generates with the weights of its beginning.

    A `prediction_step` of the trainer's own that calls `compute_loss` evaluates by a step function.
    """

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).pop(_COPY, None)
        outside = OutsideOfSteps(compute_outside, self)
        try:
            return loop(self, *args, **kwargs)
        finally:
            outside.remove(self)
            vars(self).pop(_COPY, None)

    loop = patches.replace(module.Trainer, "evaluation_loop", evaluate)


def patch_generation(module: ModuleType, patches: Patches) -> None:
    """`transformers.trainer_seq2seq`: a copy of the model generates."""

    def predict(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, **kwargs: Any
    ) -> Any:
        generates = self.args.predict_with_generate and not prediction_loss_only
        if not generates or not isinstance(model, DistributedModel):
            return step(self, model, inputs, prediction_loss_only, **kwargs)
        if _COPY not in vars(self):
            warn_once(
                "predict_with_generate",
                "predict_with_generate=True: a copy of the whole model generates on the host.",
            )
            setattr(self, _COPY, whole_copy(model, current()).eval())
        with exchanged(self, model=getattr(self, _COPY)):
            return step(self, self.model, inputs, prediction_loss_only, **kwargs)

    step = patches.replace(module.Seq2SeqTrainer, "prediction_step", predict)
