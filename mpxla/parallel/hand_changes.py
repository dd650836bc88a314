"""Gradients that a script changes between a step and the update, where it cannot reach all of them.

    for p in model.parameters():            # with some parameters divided over replicas
        if p.grad is not None:
            p.grad.mul_(0.5)                # scales those of the others only

A divided parameter has no gradient of its own: that is on a part, which optimizers hold. So such a
loop passes over it, and the update would be that of no loss. What the library writes is marked.
"""

from collections.abc import Iterable, Mapping

import torch

from mpxla.log import warn_once

__all__ = ["mark", "notice_unreached"]

_MARK = "_mpxla_version"


def mark(gradient: torch.Tensor) -> None:
    """Takes a gradient as it is as the library's."""
    setattr(gradient, _MARK, gradient._version)


def _is_changed(gradient: torch.Tensor) -> bool:
    """Whether somebody else wrote to a gradient, or made it; clearing it does not count."""
    if getattr(gradient, _MARK, None) == gradient._version:
        return False
    if not bool(gradient.any()):
        mark(gradient)
        return False
    return True


def notice_unreached(
    reached: Mapping[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Says so where gradients that parameters have themselves were changed, and no others.

    Both are by name; `others` are gradients that a script finds on parts of parameters.
    """
    changed = [name for name, gradient in reached.items() if _is_changed(gradient)]
    parts = dict(others) if changed else {}
    if not parts or any(map(_is_changed, parts.values())):
        return
    warn_once(
        "unreached gradients",
        f"the gradients of {len(changed)} parameters, as that of {changed[0]}, were changed after "
        f"the backward, and those of {len(parts)} others, as that of {next(iter(parts))}, were "
        f"not: replicas divide the others, whose param.grad is None, so that a loop over "
        f"model.parameters() does not reach them. If all were meant, scale the loss in the step "
        f"function, clip by smp.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_, or change the "
        f"gradients of what optimizer.param_groups holds.",
    )
