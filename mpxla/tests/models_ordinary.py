"""Models that work in plain PyTorch and need care when a step is captured and cut.

Each entry builds a model and a batch; `model(**batch)` gives the loss, or `.loss`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = ["MODELS", "loss_of"]

NUM_TOKENS = 50
_SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": NUM_TOKENS, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, NUM_TOKENS, (4, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _of_transformers(name: str, **keys: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**keys)), _tokens()

    return build


def swin() -> tuple[nn.Module, Any]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2,
        num_labels=3, hidden_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([1, 2, 0, 1])}
    return SwinForImageClassification(config), batch


class Pooled(nn.Module):
    """Strides that look like channels last, in front of a pool to one value."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(torch.tanh(self.enter(x)).transpose(1, 2)).flatten(1)
        return self.leave(pooled).square().sum()


class Causal(nn.Module):
    """`nn.Transformer` with a mask of its own, and one for its encoder."""

    def __init__(self) -> None:
        super().__init__()
        keys = {"dropout": 0.0, "batch_first": True}
        self.both = nn.Transformer(16, 2, 1, 1, 32, **keys)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        given = causal if mask is None else mask[0]
        return (self.both(x, x.flip(1), given, causal) * weights).square().sum()


class Operator(nn.Module):
    """Writes to parts of complex tensors, as Fourier operators do, and rows without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, 4), nn.Linear(4, 3)
        self.low = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64) / 4)
        self.high = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.enter(x).mT)
        chosen = torch.zeros_like(spectrum)
        chosen[..., :3] = torch.einsum("bik,iok->bok", spectrum[..., :3], self.low)
        chosen[..., -1] = spectrum[..., -1].conj() * self.high
        found = self.leave(torch.tanh(torch.fft.irfft(chosen, n=x.shape[1]).mT))
        row = found.mean((0, 1)).argmax()
        found = found.index_add(2, row, found.index_select(2, row).sin() * scale[:, None, None])
        return found.square().mean()


def causal() -> tuple[nn.Module, Any]:
    return Causal(), {"x": torch.randn(4, 5, 16), "weights": torch.randn(4, 5, 16)}


def masked() -> tuple[nn.Module, Any]:
    mask = torch.where(torch.rand(4, 5, 5) > 0.8, -torch.inf, 0.0)
    return Causal(), {**causal()[1], "mask": mask}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mixtral": _of_transformers(
        "MixtralForCausalLM", **_SMALL, num_local_experts=4, output_router_logits=True
    ),
    "qwen2_moe": _of_transformers(
        "Qwen2MoeForCausalLM", **_SMALL, moe_intermediate_size=16, num_experts=5,
        shared_expert_intermediate_size=16, output_router_logits=True,
    ),
    "olmoe": _of_transformers(
        "OlmoeForCausalLM", **_SMALL, num_experts=9, output_router_logits=True
    ),
    "deepseek_v3": _of_transformers(
        "DeepseekV3ForCausalLM", **_SMALL, moe_intermediate_size=16, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        v_head_dim=8, qk_nope_head_dim=4, first_k_dense_replace=1,
    ),
    "gpt_oss": _of_transformers("GptOssForCausalLM", **_SMALL, num_local_experts=4, head_dim=8),
    "switch": _of_transformers(
        "SwitchTransformersForConditionalGeneration", vocab_size=NUM_TOKENS, d_model=16, d_kv=8,
        d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=4, dropout_rate=0.0,
        router_jitter_noise=0.0, decoder_start_token_id=0, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, use_cache=False,
    ),
    "mamba": _of_transformers(
        "MambaForCausalLM", hidden_size=16, num_hidden_layers=1, vocab_size=NUM_TOKENS,
        state_size=4, use_cache=False,
    ),
    "rwkv": _of_transformers(
        "RwkvForCausalLM", hidden_size=16, num_hidden_layers=2, vocab_size=NUM_TOKENS,
        context_length=16, attention_hidden_size=16, intermediate_size=32, use_cache=False,
    ),
    "bloom": _of_transformers(
        "BloomForCausalLM", vocab_size=NUM_TOKENS, hidden_size=16, n_layer=2, n_head=2,
        hidden_dropout=0.0, attention_dropout=0.0, use_cache=False,
    ),
    "recurrent_gemma": _of_transformers(
        "RecurrentGemmaForCausalLM", vocab_size=NUM_TOKENS, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=2, lru_width=16, intermediate_size=32, attention_window_size=8,
        use_cache=False,
    ),
    "swin": swin,
    "pooled": lambda: (Pooled(), {"x": torch.randn(4, 3, 5)}),
    "operator": lambda: (Operator(), {"x": torch.randn(4, 8, 1), "scale": torch.rand(4)}),
    "causal": causal,
    "masked": masked,
}  # fmt: skip


# --- functions with a backward of their own: gradients are wrong on purpose -----------------------


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * torch.sigmoid(x)


class SettingUp(torch.autograd.Function):
    """Numbers among the arguments, several results, some without gradients."""

    @staticmethod
    def forward(x: Any, weight: Any, scale: float, bias: Any = None) -> Any:
        y = x @ weight.t() * scale
        return y, y.argmax(-1), y.relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.scale, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.y = output[0]
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, weight = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, False, False)
        in_weight = (grad * torch.cos(ctx.y)).flatten(0, -2).t() @ x.flatten(0, -2)
        return 3 * grad @ weight * ctx.scale, in_weight * ctx.scale, None, None


class Reversing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.strength * grad, None


class Writing(torch.autograd.Function):
    """Writes to tensors of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y < 0] = 0
        ctx.factors = torch.ones(x.shape[-1])
        ctx.factors[1] = 3
        ctx.save_for_backward(y.mul_(2))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        grad = grad.clone()
        grad[y == 0] = 0.1
        return grad.mul_(ctx.factors)


class Scanning(torch.autograd.Function):
    """Returns part of a tensor that it has written to by views, as parallel scans do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.pad(x, (0, 1)).transpose(-1, -2)
        y[..., 1, :].add_(y[..., 0, :].mul(2))
        ctx.save_for_backward(y)
        return y.transpose(-1, -2)[..., :-1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        grad = grad.clone()
        grad[..., 0].add_(grad[..., 1].mul(2))
        return grad * y.transpose(-1, -2)[..., :-1].cos()


class Computing(torch.autograd.Function):
    """Computes its forward again in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, body: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (in_x,) = torch.autograd.grad(ctx.body(x), x, grad)
        return None, 2 * in_x


class Rerunning(torch.autograd.Function):
    """Adds to the gradients of parameters in its backward, as a library's own checkpoint does."""

    @staticmethod
    def forward(ctx: Any, found: dict[str, Any], body: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.body = body
        ctx.save_for_backward(x)
        with torch.no_grad():
            y = body(x)
        found["width"] = y.shape[-1]  # the caller looks there
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.body(x), grad / 2)
            ctx.body(x).backward(grad / 2)
        return None, None, x.grad


def _rerunning(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: dict[str, Any] = {}
    y = Rerunning.apply(found, lambda h: torch.tanh(h @ model.weight + model.enter.bias), x)
    return y * found["width"]


class Multiplying(torch.autograd.Function):
    """Of the same tensor twice, with one more in a list and one from outside."""

    @staticmethod
    def forward(ctx: Any, others: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y * others[0] * _OUTSIDE

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return None, 2 * grad * _OUTSIDE, grad * x


class Shifting(torch.autograd.Function):
    """Changes its argument in place, and does not say so: later uses see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        x -= x.amax(-1, keepdim=True)
        y = (rate * x).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return 0.5 * grad * y, None


class Putting(torch.autograd.Function):
    """Returns the argument that it writes to."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, x: torch.Tensor, place: int) -> torch.Tensor:
        ctx.place = place
        table.data[..., place] = x
        return table

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad[..., ctx.place], None


_shifting_before = Shifting.apply  # before a step is captured


def _in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + 1
    y = _shifting_before(h, 0.5) + h
    table = torch.zeros(*y.shape, 2)
    for place in range(2):
        table = Putting.apply(table, y * (place + 1), place)
    return table.prod(-1)


_OUTSIDE = torch.arange(1.0, 9.0)


class Applying(nn.Module):
    """A network with a function in the middle."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self._function(self, torch.tanh(self.enter(x)))).square().sum()


def _setting_up(model: Any, x: torch.Tensor) -> torch.Tensor:
    y, places, positive = SettingUp.apply(x, model.weight, 0.5)
    return y * positive.sigmoid() + places.unsqueeze(-1)


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "saving": lambda model, x: Saving.apply(Saving.apply(x) + 1),
    "setting_up": _setting_up,
    "reversing": lambda model, x: Reversing.apply(x, 0.3),
    "writing": lambda model, x: Writing.apply(x),
    "scanning": lambda model, x: Scanning.apply(x),
    "computing": lambda model, x: Computing.apply(torch.tanh, x),
    "rerunning": _rerunning,
    "multiplying": lambda model, x: Multiplying.apply([x], x, x),
    "in_place": _in_place,
}


def _all_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    for function in FUNCTIONS.values():
        x = torch.tanh(function(model, x)) + x
    return x


MODELS["functions"] = lambda: (Applying(_all_functions), {"x": torch.randn(4, 6, 5)})
