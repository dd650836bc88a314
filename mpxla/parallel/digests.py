"""Whether ranks have the same values: they compare digests of them, not the values.

Hashing takes a second for some 600 MB, which is less than reading them took.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from mpxla.comm.agreement import check_agreement
from mpxla.comm.objects import Objects

__all__ = ["check_equal_values", "digest_of"]


def digest_of(tensor: torch.Tensor) -> str:
    """Type, shape and a hash of the bytes of a tensor; waits for it."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    values = flat.reshape(-1).view(torch.uint8).numpy()
    hashed = hashlib.md5(values.data, usedforsecurity=False).hexdigest()
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} with digest {hashed}"


def check_equal_values(
    objects: Objects, group: Sequence[int], values: Mapping[str, torch.Tensor]
) -> None:
    """Checks that all ranks of a group have the same tensors; all of them call it.

    Raises:
        RankMismatch: with the first name where they differ.
    """
    if len(group) == 1:
        return
    check_agreement(
        objects,
        group,
        [f"{name}: {digest_of(value)}" for name, value in sorted(values.items())],
        "give other values to model.load_state_dict",
        "Ranks divide these parameters (sharded_data_parallel_degree): each would keep its part of "
        "its own values. Load the same file on all ranks, or send the values of one rank to the "
        "others (smp.broadcast) before.",
    )
