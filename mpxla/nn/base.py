"""What all layers of `smp.nn` are, and the settings that scripts give them."""

from torch import nn

__all__ = ["SETTINGS", "DistributedModule"]

SETTINGS = frozenset(
    {
        # How SMP's kernels compute the same. XLA fuses as it likes; embeddings are split anyway.
        *("fused_softmax", "fused_bias_gelu", "fused_dropout", "flash_attention"),
        *("distribute_embedding", "query_key_layer_scaling", "attention_in_fp32"),
        "fp32_residual_addition",
        *("use_alibi", "alibi_bias_max"),
    }
)
"""Settings of tensor parallelism (SMP API reference, "smp.tensor_parallelism")."""


class DistributedModule(nn.Module):
    """Base class of the layers whose tensors can be split: those of `smp.nn`, and your own.

    A layer of your own is built of layers of `smp.nn`, or of submodules in a `_tp_plan`. Until
    `DistributedModel` wraps the model it is an ordinary, whole layer.
    (SMP API reference, "smp.nn.DistributedModule".)
    """
