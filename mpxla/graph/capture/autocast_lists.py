"""What `torch.autocast` does to each operator on each kind of device, as PyTorch lists it.

Only the list of the processor has kernels for the host tensors that steps are captured on. Those of
other devices are written down here: "Autocast Op Reference" in PyTorch's documentation, and
torch_xla's own for `xla`. A test compares every entry with the kernels of the installed PyTorch.
"""

from enum import Enum
from typing import Any

import torch

__all__ = ["LISTS", "Policy", "cast_arguments"]


class Policy(Enum):
    """What happens to the floating tensors among the arguments, but for those in float64."""

    NARROW = "cast to the type of the region"
    WIDE = "cast to float32, unless the call names the type of its result"
    WIDEST = "cast to the widest type among them"
    BANNED = "an error: the operator overflows in 16 bits"


_PRODUCTS = (
    "addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input linear matmul mm prelu"
)
_LOSSES = (
    "cosine_embedding_loss hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss binary_cross_entropy_with_logits"
)
_REDUCTIONS = (
    "prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int "
    "log_softmax.Dimname"
)
_CUDA = {
    Policy.NARROW: (
        _PRODUCTS,
        "_convolution _convolution.deprecated addmv addr chain_matmul convolution einsum gru_cell "
        "linalg_multi_dot linalg_vecdot lstm_cell mv rnn_relu_cell rnn_tanh_cell "
        "scaled_dot_product_attention",
    ),
    Policy.WIDE: (
        _LOSSES,
        _REDUCTIONS,
        "acos asin cdist cosh cosine_similarity cumprod cumprod.dimname cumsum cumsum.dimname dist "
        "erfinv exp expm1 frobenius_norm.dim group_norm huber_loss layer_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 logsumexp "
        "native_layer_norm norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim nuclear_norm "
        "nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor "
        "reciprocal renorm rsqrt sinh softplus sum sum.dim_DimnameList sum.dim_IntList tan "
        "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa "
        "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d",
    ),
    Policy.WIDEST: (
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot "
        "vdot",
    ),
    Policy.BANNED: ("binary_cross_entropy",),
}
_XLA = {
    Policy.NARROW: (
        _PRODUCTS,
        "conv1d.padding conv2d.padding conv3d.padding einsum max_pool2d relu",
    ),
    Policy.WIDE: (
        _LOSSES,
        _REDUCTIONS,
        "_softmax batch_norm binary_cross_entropy cdist cholesky cholesky_inverse cholesky_solve "
        "cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor inverse linalg_inv_ex linalg_svd "
        "multilabel_margin_loss_forward pow.Tensor_Scalar qr reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d replication_pad3d svd trace triangular_solve",
    ),
    Policy.WIDEST: ("cat index_copy index_copy.dimname stack",),
}


def _flat(lists: dict[Policy, tuple[str, ...]]) -> dict[str, Policy]:
    return {name: policy for policy, texts in lists.items() for name in " ".join(texts).split()}


LISTS: dict[str, dict[str, Policy]] = {"cuda": _flat(_CUDA), "xla": _flat(_XLA)}
"""Kind of device -> operator of `aten`, with its overload -> policy."""
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
if _has_kernel("aten::rms_norm", "AutocastCUDA"):  # torch 2.13
    LISTS["cuda"]["rms_norm"] = Policy.WIDE


def cast_arguments(policy: Policy, arguments: list[Any], dtype: torch.dtype) -> list[Any]:
    """Arguments of an operator, flat and of any type, as a region of this dtype hands them on."""
    tensors = [a for a in arguments if _is_eligible(a)]
    if policy is Policy.WIDE:
        if any(isinstance(a, torch.dtype) for a in arguments):
            return arguments
        dtype = torch.float32
    elif policy is Policy.WIDEST and any(t.dtype is torch.float32 for t in tensors):
        dtype = torch.float32
    return [a.to(dtype) if _is_eligible(a) else a for a in arguments]


def _is_eligible(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.dtype is not torch.float64
