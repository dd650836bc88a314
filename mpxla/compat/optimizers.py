"""LAMB and NovoGrad with the settings of apex's fused optimizers, whose names SMP has.

XLA fuses their updates by itself. Norms of single tensors need whole tensors, so the two do not go
with keys that divide parameters, which refuse them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpxla.compat import CompatError

__all__ = ["FusedLamb", "FusedNovoGrad"]

_Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
_Betas = tuple[float, float]


class _Plain(torch.optim.Optimizer):
    """What the two share."""

    def __init__(self, params: _Parameters, amsgrad: bool, set_grad_none: bool, **defaults: Any):
        kind = type(self).__name__
        if amsgrad:
            raise CompatError(f"{kind} has no AMSGrad variant; leave amsgrad out.")
        if not set_grad_none:
            raise CompatError(
                f"{kind}(set_grad_none=False): leave it out, and call "
                f"optimizer.zero_grad(set_to_none=False)."
            )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)
        return loss

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


def _corrections(state: dict[str, Any], group: dict[str, Any]) -> tuple[Any, Any]:
    """Counts a step. Returns by what its averages are too small, since they start from zero."""
    state["step"] += 1
    if not group["bias_correction"]:
        return 1.0, 1.0
    step, (beta1, beta2) = state["step"], group["betas"]
    # In 32 bits, 1 - 0.999 is off by 6e-5; devices may have no others.
    count = step.double() if step.device.type == "cpu" else step
    return 1 - beta1**count, 1 - beta2**count


class FusedLamb(_Plain):
    """LAMB (You et al., 2020, "Large batch optimization for deep learning", algorithm 2).

    Before an update, all gradients are clipped in place by their norm over all ranks, so that all
    ranks of a replica call `step`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct averages for their start from zero.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: factor of the parameter in its update.
        amsgrad: must be False.
        adam_w_mode: decay the weights in the update; False: in the gradient.
        grad_averaging: multiply gradients by 1 - beta1 in their average.
        set_grad_none: must be True.
        max_grad_norm: largest norm of all gradients; 0 or None not to clip.
        use_nvlamb: scale updates without weight decay by the norms too.

    Raises:
        CompatError: a setting is not supported.
    """

    def __init__(
        self,
        params: _Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ):
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        super().__init__(params, amsgrad, set_grad_none, **settings)
        self._decays_update, self._always_scales = adam_w_mode, use_nvlamb
        self._max_norm = max_grad_norm
        # Not in `step`, which a DistributedOptimizer compiles for this rank's parameters.
        self.register_step_pre_hook(lambda *_: self.clip_gradients())

    def clip_gradients(self) -> None:
        """Clips all gradients; a rank without parameters has to take part."""
        if self._max_norm:
            held = [parameter for group in self.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, self._max_norm)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        correction1, correction2 = _corrections(state, group)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        value = parameter.float()
        if decay and not self._decays_update:
            gradient = gradient + decay * value
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        average = beta1 * state["exp_avg"].float() + share * gradient
        square = beta2 * state["exp_avg_sq"].float() + (1 - beta2) * gradient.square()
        update = (average / correction1) / ((square / correction2).sqrt() + group["eps"])
        if decay and self._decays_update:
            update = update + decay * value
        if decay or self._always_scales:
            norms = value.norm(), update.norm()
            ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
            update = ratio * update
        state["exp_avg"].copy_(average)
        state["exp_avg_sq"].copy_(square)
        parameter.copy_(value - group["lr"] * update)


class FusedNovoGrad(_Plain):
    """NovoGrad (Ginsburg et al., 2019, "Stochastic gradient methods with layer-wise adaptive
    moments", algorithm 1), whose second moment is one number for each parameter.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: correct averages for their start from zero.
        betas: of the averages of gradients and of their norms.
        eps: added to the denominator.
        weight_decay: factor of the parameter in its update.
        amsgrad: must be False.
        reg_inside_moment: normalize and decay before gradients are averaged, as in the paper.
        grad_averaging: multiply gradients by 1 - beta1 in their average.
        norm_type: 2, or 0 for the largest element.
        init_zero: let the average of norms start from zero, and not from the first norm.
        set_grad_none: must be True.

    Raises:
        CompatError: a setting is not supported.
    """

    def __init__(
        self,
        params: _Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ):
        if norm_type not in (0, 2):
            raise CompatError(f"FusedNovoGrad(norm_type={norm_type!r}): give 2, or 0 for infinity.")
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        settings |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, amsgrad, set_grad_none, **settings)
        self._is_inside = reg_inside_moment

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            # Not a scalar: of scalars, a compiled update keeps one for all parameters.
            state["norm"] = torch.zeros(1, device=parameter.device)
        correction1, correction2 = _corrections(state, group)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        value = parameter.float()
        is_euclidean = group["norm_type"] == 2
        norm = gradient.norm().reshape(1) if is_euclidean else gradient.abs().max().reshape(1)
        before = state["norm"]
        if not group["init_zero"]:
            is_first = (state["step"] == 1).to(norm.device)  # counts may be on the host
            before = torch.where(is_first, norm, before)
        if is_euclidean:
            norm = (beta2 * before.square() + (1 - beta2) * norm.square()).sqrt()
        else:
            norm = beta2 * before + (1 - beta2) * norm
        scale = norm / correction2**0.5 + group["eps"]
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        if self._is_inside:
            gradient = gradient / scale + decay * value
        average = beta1 * state["exp_avg"].float() + share * gradient
        update = average / correction1
        if not self._is_inside:
            update = update / scale + decay * value
        state["exp_avg"].copy_(average)
        state["norm"].copy_(norm)
        parameter.copy_(value - group["lr"] * update)
