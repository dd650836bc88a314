"""Parameters of which ranks hold parts elsewhere: a shape and a name, without values.

What a script writes to one would be lost without a word, as torch's device `meta` takes any write.
So they notice it, and the next step, update or state dict ends in an error. This module must not
know where the parts are.
"""

from typing import Any

import torch
from torch import nn

from mpxla.errors import StepError
from mpxla.runtime.valueless import Valueless

__all__ = ["DividedParameter", "check_no_gradient"]


def check_no_gradient(name: str, parameter: nn.Parameter) -> None:
    """Checks that a parameter in a module, where no optimizer looks, has got no gradient.

    Raises:
        StepError: somebody has.
    """
    # Not what it shows of pieces elsewhere, which all ranks would have to ask for.
    if torch.Tensor.grad.__get__(parameter) is not None:  # pyright: ignore
        raise StepError(
            f"the parameter {name} has a gradient from outside of step functions (a backward "
            f"there, or an assignment), which no optimizer sees: replicas divide updates "
            f"(shard_optimizer_state, shard_gradients or sharded_data_parallel_degree), and each "
            f"holds a piece. Add the term to the loss in the step function, or change the "
            f"gradients of the pieces in optimizer.param_groups."
        )


class DividedParameter(Valueless, nn.Parameter):
    """Stands in a module for a parameter that is divided over ranks."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Always the same tensor, whose version tells of writes; torch makes one every time."""
        return self._seen()[0]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        seen, _, own_version = self._seen()
        if value is not seen and value is not self:  # `.float()` of what is so already
            vars(self)["_mpxla_seen"] = [value, -1, own_version]

    def _seen(self) -> list[Any]:
        """What `.data` gives, the version of that without writes, and that of the parameter."""
        seen = vars(self).get("_mpxla_seen")
        if seen is None:
            value: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
            seen = vars(self)["_mpxla_seen"] = [value, value._version, self._version]
        return seen

    def forget_writes(self) -> None:
        """Takes what has been written as known."""
        vars(self).pop("_mpxla_seen", None)
        self._seen()

    def check(self, name: str) -> None:
        """Checks that nobody has written to it, nor put a gradient on it.

        Raises:
            StepError: somebody has.
        """
        value, version, own_version = self._seen()
        if (value._version, self._version) != (version, own_version):
            raise StepError(
                f"the parameter {name} was written to after smp.DistributedModel (in place, by "
                f".data or a change of dtype, or by load_state_dict of a module in it), and "
                f"nothing came of it: values are divided over ranks "
                f"(sharded_data_parallel_degree), and the module's own tensor is empty. Write "
                f"before smp.DistributedModel, in a block of model.summon_full_params(), or give "
                f"whole values to model.load_state_dict; what treats every element alike, as a "
                f"clamp does, may write to the parts in optimizer.param_groups."
            )
        check_no_gradient(name, self)
