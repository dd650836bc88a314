"""What steps read on the device and what belongs to no model, shared by all plans.

That are host tensors, such as a loss scale or a teacher's weights, and the zeros that gradients
start from. There is a plan for every shape of a batch, and a teacher may be as large as the model.
"""

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch

from mpxla.device.backend import Backend, Buffer
from mpxla.errors import StepError
from mpxla.runtime.valueless import WHERE, Valueless
from mpxla.stage.spec import TensorSpec

__all__ = ["Constant", "Constants"]


class Constant:
    """One tensor, for as long as some plan reads it.

    Attributes:
        given: the user's own tensor, which may change.
        copy: its values when it was uploaded.
        buffer: those on the device.
    """

    def __init__(self, given: torch.Tensor):
        self.given = given
        self.copy: torch.Tensor | None = None
        self.buffer: Buffer = None

    @property
    def is_current(self) -> bool:
        """Whether the device has the values that the tensor has now."""
        return self.copy is not None and torch.equal(self.given, self.copy)


class Constants:
    """The tensors that the plans of a session read."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._zeros: dict[TensorSpec, Buffer] = {}
        self._known = WeakValueDictionary[int, Constant]()  # by id, of a tensor that it holds

    def of(self, given: torch.Tensor) -> Constant:
        """What is known of a tensor; forgotten when nobody holds it."""
        return self._known.setdefault(id(given), Constant(given))

    def upload(self, constants: Iterable[Constant]) -> None:
        """Uploads those that are not on the device, or have changed since they were put there.

        They are compared by their numbers, since writes to `.data` or by NumPy are not counted by
        PyTorch.

        Raises:
            StepError: one is without values on this rank.
        """
        old = [constant for constant in constants if not constant.is_current]
        for constant in old:
            if isinstance(constant.given, Valueless):
                raise StepError(
                    f"the step function computes with a tensor of shape "
                    f"{list(constant.given.shape)} that has no values here: it was computed from a "
                    f"parameter or buffer when the step function was not running, and {WHERE}. "
                    f"Compute a number with each parameter by itself, "
                    f"(parameter - kept).square().sum(), and add these up; or keep whole values, "
                    f"from model.state_dict()."
                )
        copies = [constant.given.detach().clone() for constant in old]
        buffers = self._backend.put(copies, owned=True) if copies else ()
        for constant, copy, buffer in zip(old, copies, buffers, strict=True):
            constant.copy, constant.buffer = copy, buffer

    def zeros(self, specs: Sequence[TensorSpec]) -> list[Buffer]:
        """What gradients start from: new buffers where backwards take them, else the same."""
        if self._backend.donates:
            return self._backend.zeros(specs)
        new = [spec for spec in dict.fromkeys(specs) if spec not in self._zeros]
        self._zeros.update(zip(new, self._backend.zeros(new), strict=True))
        return [self._zeros[spec] for spec in specs]
