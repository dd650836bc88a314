"""Every architecture of transformers that has a tiny configuration, one step in two stages.

    python -m mpxla.tests.architectures              # tries all, writes docs/architectures.md
    python -m mpxla.tests.architectures gpt2 bert    # tries some, writes nothing

An architecture is a kind of configuration for which the library has a model with a loss. Its tiny
configuration is the default one with small numbers in the fields that configurations share.
"""

import contextlib
import io
import json
import re
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["architectures", "built", "outcome", "table"]

NUM_TOKENS, LENGTH, BATCH, IMAGE = 64, 8, 2, 32
LARGEST = 3_000_000
"""Parameters of a model that counts as tiny."""
_PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
_KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_VALUES: tuple[tuple[Any, str], ...] = (
    (
        16,
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size lru_width "
        "attention_hidden_size ssm_hidden_size shared_expert_intermediate_size "
        "moe_intermediate_size expert_ffn_hidden_size state_size",
    ),
    (
        32,
        "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim "
        "ffn_hidden_size mlp_hidden_size inner_dim max_position_embeddings n_positions n_ctx "
        "context_length max_seq_len image_size block_size n_ctx max_source_positions "
        "max_target_positions sliding_window",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_decoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_key_value_heads num_experts_per_tok patch_size_text",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts patch_size "
        "qk_rope_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank",
    ),
    (8, "head_dim d_kv v_head_dim"),
    (NUM_TOKENS, "vocab_size"),
    (
        0.0,
        "dropout attention_dropout activation_dropout hidden_dropout hidden_dropout_prob "
        "attention_probs_dropout_prob embd_pdrop resid_pdrop attn_pdrop dropout_rate embed_dropout "
        "classifier_dropout drop_path_rate layerdrop encoder_layerdrop decoder_layerdrop "
        "attention_dropout_prob router_jitter_noise jitter_noise embedding_dropout ffn_dropout "
        "classifier_dropout_prob residual_dropout dropout_prob",
    ),
    (
        1,
        "pad_token_id n_group topk_group first_k_dense_replace decoder_start_token_id "
        "bos_token_id eos_token_id n_shared_experts",
    ),
    (False, "use_cache"),
)


def architectures() -> dict[str, tuple[str, str]]:
    """Kind of configuration -> (kind of model, class); the first kind of model that has one."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for kind, mapping in _KINDS.items():
        for name, classes in getattr(modeling_auto, mapping).items():
            chosen = classes if isinstance(classes, str) else classes[0]
            found.setdefault(name, (kind, chosen))
    return dict(sorted(found.items()))


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of an architecture and a batch with labels.

    Raises:
        ValueError: there is no tiny configuration.
    """
    import transformers

    kind, chosen = architectures()[name]
    model_class = getattr(transformers, chosen)
    default = model_class.config_class()
    keys = {
        key: value
        for value, names in _VALUES
        for key in names.split()
        if isinstance(getattr(default, key, None), (int, float, bool))
        or (value is not None and value == 1 and hasattr(default, key))
    }
    config = model_class.config_class(**keys)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its small numbers give {size} parameters")
    torch.manual_seed(5)
    model = model_class(config)
    _untie(model)
    return model, _batch(kind)


def _untie(model: nn.Module) -> None:
    """Gives small random values to matrices of zeros, such as the weights of a new router.

    All experts of a new router have one score, and which of equal numbers `topk` takes is left open
    by PyTorch: kernels differ, and no loss is the right one.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(0, 0.02, generator=generator)


def _batch(kind: str) -> dict[str, torch.Tensor]:
    if kind == "image":
        return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, NUM_TOKENS, (BATCH, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    given = {key: value.clone() for key, value in batch.items()}  # FSMT writes to its labels
    return model(**given).loss


def outcome(name: str) -> tuple[str, str]:
    """What becomes of one architecture.

    Returns:
        (passed | host | refused | different | failed | not tiny | not plain, and why). Refused is
        an error of mpxla's own, failed any other.
    """
    from mpxla.errors import MpxlaError
    from mpxla.tests.stages_by_hand import (
        differences,
        rounding_errors,
        run_in_stages,
        run_plainly,
    )

    try:
        model, batch = built(name)
    except Exception as error:
        return "not tiny", _line(error)
    try:
        plain = run_plainly(model, _loss, batch)
        again = differences(plain, run_plainly(model, _loss, batch))
    except Exception as error:
        return "not plain", _line(error)
    if again:
        return "not plain", f"two plain steps differ: {again}"[:200]
    try:
        staged = run_in_stages(model, _loss, batch)
    except MpxlaError as error:
        return "refused", _line(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {_line(error)}"
    if not differences(plain, staged):
        return "passed", ""
    errors = rounding_errors(model, _loss, batch)
    if found := differences(plain, staged, rounding=errors):
        return "different", found[:300]
    return "passed", "as near as float32 in plain PyTorch is to float64"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return textwrap.shorten(re.sub(r"\S*/site-packages/", "", text), 240, placeholder="")


def outcomes(names: list[str], log: Path | None = None) -> dict[str, tuple[str, str]]:
    """Outcomes of several architectures, one after the other, in this process."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found[name] = outcome(name)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps([name, *found[name]]) + "\n")
    return found


def table(found: dict[str, tuple[str, str]]) -> str:
    """The page with all outcomes."""
    counts = Counter(result for result, _ in found.values())
    kinds = architectures()
    lines = [
        "# Architectures of transformers",
        "",
        "Generated by `python -m mpxla.tests.architectures`: one training step of every",
        "architecture that has a tiny configuration, in two stages, against plain PyTorch (loss,",
        "gradients, changed buffers). The tolerance is 1e-4, or 4 times the distance of plain",
        "float32 from float64 where that is more, as it is after dozens of batch norms with two",
        "samples. Architectures whose small numbers do not fit together, or that need other inputs",
        "than ids or images, are not counted.",
        "",
        "| outcome | architectures |",
        "|---|---|",
        *(f"| {result} | {counts[result]} |" for result in _COUNTED),
        "",
        "| architecture | model | outcome | why |",
        "|---|---|---|---|",
    ]
    for name, (result, why) in found.items():
        if result in _COUNTED:
            why = why.replace("|", "\\|")
            lines.append(f"| {name} | {kinds[name][1]} | {result} | {why} |")
    return "\n".join(lines) + "\n"


_COUNTED = ("passed", "refused", "failed", "different")


def main(names: list[str]) -> None:
    """Tries architectures, prints what becomes of them, and writes the page for all."""
    found = outcomes(names or list(architectures()), Path("/dev/stderr"))
    if not names:
        _PAGE.write_text(table(found))
    print(Counter(result for result, _ in found.values()))


if __name__ == "__main__":
    from mpxla.device.torch_xla.tensors import current_device

    current_device()
    main(sys.argv[1:])
