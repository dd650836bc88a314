"""Arguments that step functions change in place: what forbids it, and where new values go.

Each microbatch changes a copy of its part (`graph/python/rewritten.py`). The parts of the caller's
tensors take the new values when all microbatches have run, on every rank that has such tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.graph.containers import open_containers
from mpxla.graph.memory import share_memory
from mpxla.graph.python.rewritten import Rewritten
from mpxla.runtime.signature import Signature

__all__ = ["problem_of_memory", "write_back"]


def problem_of_memory(
    signature: Signature, changed: Sequence[str], microbatches: Sequence[Sequence[torch.Tensor]]
) -> str | None:
    """Which memory of an argument that changes something else reads, as a text for the user.

    Args:
        signature: of the call.
        changed: paths of arguments.
        microbatches: the tensor leaves of each of them.
    """
    if not changed:
        return None
    paths = signature.tensor_paths
    for path in changed:
        place = paths.index(path)
        parts = [leaves[place] for leaves in microbatches]
        text = f"{signature.function}: the step function changes the argument {path} in place, "
        if len(parts) > 1 and (not parts[0].dim() or parts[0] is parts[1]):
            return (
                f"{text}which every microbatch gets whole: each would see the changes of those "
                f"before it. Change a copy: x = x.clone()."
            )
        for other, tensor in zip(paths, microbatches[0], strict=True):
            if other != path and share_memory(tensor, parts[0]):
                return f"{text}which shares memory with the argument {other}. Pass a copy of one."
    return None


def write_back(
    rewritten: Rewritten, microbatches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
) -> Any:
    """Gives this rank's arguments the new values, and returns what the function has returned.

    Args:
        rewritten: with a `StepOutput` of every argument.
        microbatches: (args, kwargs) of each of this rank's, which are views of the caller's.
    """
    given: list[dict[str, Any]] = []
    for args, kwargs in microbatches:
        flat, _ = pytree.tree_flatten_with_path(open_containers((args, dict(kwargs))))
        given.append({pytree.keystr(path): value for path, value in flat})
    for path, output in zip(rewritten.paths, rewritten.values, strict=True):
        for own, value in zip(given, output.outputs, strict=True):
            target = own.get(path)
            # Later pipeline ranks may have been called with something else.
            if isinstance(target, torch.Tensor) and target.shape == value.shape:
                target.copy_(value)
    return rewritten.returned
