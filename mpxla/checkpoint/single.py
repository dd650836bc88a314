"""`smp.save` and `smp.load`: one object in one file, or one file for every model-parallel rank."""

import os
import pickle
from pathlib import Path
from typing import Any

from mpxla.checkpoint.files import check_zip, load_object, replace_file, serialize
from mpxla.errors import CheckpointError
from mpxla.session import current

__all__ = ["load", "save"]


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves an object like `torch.save`, to a file that is complete or not there.

    The name of a partial file ends in the rank: `<f>_<mp_rank>` without tensor parallelism,
    `<f>_<pp_rank>_<tp_rank>` with it, `<f>_<pp_rank>_<tp_rank>_<rdp_rank>` with `v3`. Every rank
    that calls it writes, so guard the call with `smp.dp_rank() == 0` (`smp.rdp_rank() == 0` with
    tensor parallelism) unless `v3`. (SMP API reference, "smp.save".)

    Args:
        obj: what to save.
        f: path.
        partial: one file for every model-parallel rank; otherwise `f` itself is written.
        pickle_module: as for `torch.save`.
        pickle_protocol: as for `torch.save`.
        v3: one file for every rank.

    Raises:
        CheckpointError: the path is not a string, or the object cannot be pickled.
        OSError: the file cannot be written; one of that name stays as it was.
    """
    path = _checked(f, "save")
    data = serialize(
        obj,
        f"the object for {f}",
        is_trusted=current().config.trust_checkpoints,
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )
    target = Path(f"{path}{_suffixes()[2 if v3 else 0]}") if partial else path
    # Scripts save a full file on all ranks of a replica, which then write it side by side.
    replace_file(target, data)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads what `smp.save` or `torch.save` wrote. Runs no code from the file by default.

    (SMP API reference, "smp.load".)

    Args:
        f: path, as given to `smp.save`.
        map_location: as for `torch.load`; tensors come to the host by default.
        pickle_module: as for `torch.load`; needs `weights_only=False`.
        partial: pick the file of this rank; otherwise `f` itself is read.
        back_compat: SMP's switch for optimizer files of its versions before 1.10, whose layout is
            not public: not supported.
        weights_only: refuse objects whose loading could run code. Without it, the configuration's
            `trust_checkpoints` decides. Extension of SMP's API.
        **pickle_load_args: as for `torch.load`; or one dictionary of that name, which is how the
            SMP API reference shows them.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or holds objects whose loading
            could run code.
    """
    path = _checked(f, "load")
    if back_compat:
        raise CheckpointError(
            "smp.load(back_compat=True) reads optimizer files of SMP before 1.10, whose layout is "
            "not public; save them again with a later version."
        )
    if weights_only is None:
        weights_only = not current().config.trust_checkpoints
    pickle_load_args |= pickle_load_args.pop("pickle_load_args", None) or {}
    if pickle_module is not None and weights_only:
        raise CheckpointError("smp.load(pickle_module=...) can run code; pass weights_only=False.")
    if partial:
        candidates = [Path(f"{path}{suffix}") for suffix in _suffixes()]
        path = next((c for c in candidates if c.exists()), candidates[0])
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; check the path and partial={partial}.")
    check_zip(path)
    if pickle_module is not None:
        pickle_load_args["pickle_module"] = pickle_module
    return load_object(path, weights_only, map_location=map_location or "cpu", **pickle_load_args)


def _checked(f: Any, what: str) -> Path:
    if not isinstance(f, str | os.PathLike):
        raise CheckpointError(f"smp.{what} takes a path, not a {type(f).__name__}.")
    current()
    return Path(f)


def _suffixes() -> list[str]:
    """Endings of this rank's partial file: the one to write, another to read, that of `v3`."""
    session = current()
    topology, rank = session.topology, session.rank
    by_axes = f"_{topology.pp_rank(rank)}_{topology.tp_rank(rank)}"
    found = [f"_{topology.mp_rank(rank)}", by_axes]
    ordered = found if topology.tp_size == 1 else found[::-1]
    return [*ordered, f"{by_axes}_{topology.rdp_rank(rank)}"]
