"""Names in a checkpoint folder, and what they say about its state.

    <path>/<tag>_partial/                 a partial checkpoint: complete, since it has this name
               model_<rankinfo>.pt        what one rank wrote of the model
               optimizer_<rankinfo>.pt    the same of the optimizer
               rank_<rankinfo>.pt         random states, and what only this rank has
               param_groups.pt            settings of the optimizer
               user_content.pt
               partition.pt               where parameters lived
               manifest.json              what is in which file, with checksums
    <path>/<tag>, user_content_<tag>      a full checkpoint
    <path>/newest                         the tag of the newest checkpoint
    <path>/.<tag>_partial.<token>.writing not complete yet, or never completed
    <path>/.<tag>_partial.replaced        the earlier one of that tag, while it is being replaced
    <path>/.<tag>_partial.removed         about to be deleted

`<rankinfo>` is `<pp_rank>_<tp_rank>_<rdp_rank>`. (SMP API reference, "save_checkpoint".)
This module must not know what files hold.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mpxla.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "NEWEST",
    "PARAM_GROUPS",
    "PARTITION",
    "USER_CONTENT",
    "check_tag",
    "full_file",
    "full_user_content",
    "hidden_folder",
    "leftovers",
    "manifests",
    "partial_folder",
    "rank_file",
    "rank_info",
    "read_newest",
    "writing_folder",
]

MANIFEST = "manifest.json"
NEWEST = "newest"
PARAM_GROUPS = "param_groups.pt"
PARTITION = "partition.pt"
USER_CONTENT = "user_content.pt"
_SUFFIX = "_partial"


def check_tag(tag: object) -> str:
    """The tag as text.

    Raises:
        CheckpointError: it cannot be a file name, or means another file.
    """
    text = str(tag)
    is_taken = text == NEWEST or text.startswith(("user_content_", ".")) or text.endswith(_SUFFIX)
    if not text or is_taken or not re.fullmatch(r"[^/\0\n]+", text):
        raise CheckpointError(
            f"the tag {text!r} cannot name a checkpoint; use a word like 'step_100', without '/', "
            f"that does not start with '.' or 'user_content_', end in '{_SUFFIX}' or equal "
            f"'{NEWEST}'."
        )
    return text


def rank_info(pp_rank: int, tp_rank: int, rdp_rank: int) -> str:
    """The part of a file's name that tells the rank."""
    return f"{pp_rank}_{tp_rank}_{rdp_rank}"


def rank_file(kind: str, info: str) -> str:
    """Name of a rank's file in the folder of a partial checkpoint."""
    return f"{kind}_{info}.pt"


def partial_folder(path: Path, tag: str) -> Path:
    """Folder of a partial checkpoint."""
    return path / f"{tag}{_SUFFIX}"


def hidden_folder(path: Path, tag: str, state: str) -> Path:
    """Folder of a partial checkpoint that is "replaced" or "removed"."""
    return path / f".{tag}{_SUFFIX}.{state}"


def writing_folder(path: Path, tag: str, token: str) -> Path:
    """Folder of a partial checkpoint while it is written; no other attempt has the token."""
    return path / f".{tag}{_SUFFIX}.{token}.writing"


def leftovers(path: Path) -> Iterator[tuple[str, str, Path]]:
    """(tag, state, folder) of everything that is no complete checkpoint, or about to be deleted."""
    for folder in path.glob(f".*{_SUFFIX}.*"):
        tag, _, rest = folder.name.removeprefix(".").rpartition(f"{_SUFFIX}.")
        state = rest.rpartition(".")[2]
        if state in ("writing", "replaced", "removed"):
            yield tag, state, folder


def full_file(path: Path, tag: str) -> Path:
    """File of a full checkpoint."""
    return path / tag


def full_user_content(path: Path, tag: str) -> Path:
    """User content of a full checkpoint."""
    return path / f"user_content_{tag}"


def manifests(path: Path) -> dict[str, Path]:
    """Manifests of the complete partial checkpoints, by tag."""
    found = path.glob(f"*{_SUFFIX}/{MANIFEST}")
    return {
        file.parent.name.removesuffix(_SUFFIX): file
        for file in found
        if not file.parent.name.startswith(".")
    }


def read_newest(path: Path) -> str:
    """The tag that the file `newest` names.

    Raises:
        CheckpointError: there is no such file, or it names nothing.
    """
    try:
        tag = (path / NEWEST).read_bytes().decode(errors="replace").strip()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no file '{NEWEST}', so there is no checkpoint to resume from, or it was "
            f"not written by smp.save_checkpoint. Pass the tag, or check the path."
        ) from error
    if not tag:
        raise CheckpointError(f"{path / NEWEST} is empty; pass the tag of a checkpoint.")
    return tag
