"""Splits a model over the ranks of a tensor-parallel group: `smp.set_tensor_parallelism`.

Before `DistributedModel` wraps a model, the layers that the user asked for get smaller parameters,
with the values that they had. Everything else (cutting, schedules, optimizers) sees a model that is
smaller on each rank. (SMP made new layers with new weights.)
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpxla.comm.transport import Members
from mpxla.delayed import materialize
from mpxla.errors import ConfigError
from mpxla.log import get_logger
from mpxla.nn.layers import divide_size, find_shards, split
from mpxla.nn.marks import marking
from mpxla.nn.plans import Unit, units_of
from mpxla.nn.registry import exchange, is_registered, known_arguments
from mpxla.nn.shards import Shard
from mpxla.nn.transformer import DistributedTransformerLayer, DistributedTransformerLMHead

__all__ = [
    "check_wholes",
    "distribute",
    "exchange_registered",
    "first_part",
    "mark_modules",
    "refuse_with_shards",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "without_shards",
]

_SWITCH = "_mpxla_tensor_parallelism"
_SETTINGS = frozenset(
    {
        # How SMP's kernels compute the same. XLA fuses as it likes; embeddings are split anyway.
        *("fused_softmax", "fused_bias_gelu", "fused_dropout", "flash_attention"),
        *("distribute_embedding", "query_key_layer_scaling", "attention_in_fp32"),
        "fp32_residual_addition",
        *("use_alibi", "alibi_bias_max"),
    }
)
"""Settings of tensor parallelism (SMP API reference, "smp.tensor_parallelism")."""


@dataclass(frozen=True)
class _Switch:
    """What a script says of a module."""

    is_on: bool
    settings: Mapping[str, Any]


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **settings: Any) -> None:
    """Says that a module's layers are to be split over the ranks of the tensor-parallel group.

    Call it before `DistributedModel`, on the whole model or on a part; the innermost call counts.
    Which layers are split follows from the model: transformers' own plan (`tp_plan`), or mpxla's
    for models that have none (GPT-2, BERT, RoBERTa, ViT). What cannot be split stays whole, and a
    log line says why. Loaded weights stay: every rank keeps its part of them. (SMP API reference,
    "smp.set_tensor_parallelism", where weights are drawn anew.) Modules of classes that were
    registered by `smp.tp_register` are exchanged for new ones.

    Args:
        module: the model, or a part of it.
        enabled: False leaves it whole.
        **settings: arguments for constructors of registered classes, and SMP's settings of fused
            kernels, without effect.

    Raises:
        ConfigError: an unknown setting.
    """
    vars(module)[_SWITCH] = _switch("smp.set_tensor_parallelism", enabled, settings)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **settings: Any) -> Generator[None]:
    """As `set_tensor_parallelism`, for the modules that are built inside; the innermost counts.

    (SMP API reference, "smp.tensor_parallelism".)

    Args:
        enabled: False leaves them whole.
        **settings: as for `set_tensor_parallelism`.

    Raises:
        ConfigError: an unknown setting.
    """
    with mark_modules("smp.tensor_parallelism", enabled, settings):
        yield


def mark_modules(
    what: str, enabled: bool, settings: Mapping[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """The block of `tensor_parallelism`, where `what` is the call of the script, for messages.

    Raises:
        ConfigError: an unknown setting.
    """
    return marking(_SWITCH, _switch(what, enabled, settings))


def _switch(what: str, enabled: bool, settings: Mapping[str, Any]) -> _Switch:
    known = _SETTINGS | known_arguments()
    for kind in (DistributedTransformerLMHead, DistributedTransformerLayer):
        known |= set(inspect.signature(kind).parameters)
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(
            f"{what} has no setting {unknown[0]!r} here; the layers compute as the model has them, "
            f"and what they compute is set in the model's configuration."
        )
    return _Switch(bool(enabled), dict(settings))


def exchange_registered(model: nn.Module) -> nn.Module:
    """Puts distributed modules in the places of registered ones that are switched on.

    Changes the model, and returns it or what takes its place.

    Of nested ones only the outermost are exchanged. Those that share parameters with the rest of
    the model stay, and a log line says so.

    Raises:
        ConfigError: a hook returns the wrong things, see `registry`.
    """
    holders: dict[str, set[str]] = {}
    ids = {id(p): n for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(ids[id(parameter)], set()).add(name)
    made: dict[int, nn.Module] = {}
    done: list[str] = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if any(path == other or path.startswith(f"{other}.") for other in done):
            continue
        switch = _switch_at(model, path)
        if not is_registered(module) or switch is None or not switch.is_on:
            continue
        inside = f"{path}." if path else ""
        shared = [n for n in holders.values() if len({m.startswith(inside) for m in n}) > 1]
        if shared:
            get_logger().warning(
                "tensor parallelism: %s stays as it is, because it shares %s with the rest of the "
                "model",
                path,
                min(shared[0]),
            )
            continue
        if id(module) not in made:
            made[id(module)] = exchange(path, module, switch.settings)
        done.append(path)
        if not path:
            return made[id(module)]
        vars(made[id(module)])[_SWITCH] = switch
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[id(module)])
    return model


def distribute(model: nn.Module, group: Members) -> dict[str, Shard]:
    """Splits what the user asked for, in place. All ranks of the group call it.

    Returns:
        Split parameters by the first of their names, with the part that this rank has.

    Raises:
        ConfigError: the model has no values yet.
    """
    size = len(group.ranks)
    if size == 1:
        return {}
    index = group.ranks.index(group.transport.rank)
    return _split(model, index, size, functools.partial(_give_values, group, set()))


def first_part(model: nn.Module, size: int) -> dict[str, Shard]:
    """Makes a model what the first of `size` ranks has, in one process. For forecasts.

    All of the model is taken to be switched on.
    """
    set_tensor_parallelism(model)
    return _split(model, 0, size, lambda path, module: None)


def _split(
    model: nn.Module, index: int, size: int, give_values: Callable[[str, nn.Module], None]
) -> dict[str, Shard]:
    """Splits what is switched on, layer by layer, after `give_values` of each."""
    chosen = [unit for unit in units_of(model, size) if _is_enabled(model, unit)]
    known: dict[int, Shard] = {}
    for unit in chosen:
        if unit.problem is None:
            for entry in unit.entries:
                give_values(entry.path, entry.module)
                split(entry.module, entry.style, index, size, entry.blocks, known)
            for module, name in {(id(m), n): (m, n) for m, n in unit.sizes}.values():
                divide_size(module, name, size)
    give_values("", model)
    _report(model, chosen, size, index)
    names = {id(p): n for n, p in model.named_parameters()}
    return find_shards(model, names)


def without_shards(
    values: Mapping[str, Any], shards: Mapping[str, Shard], names: Mapping[str, str]
) -> dict[str, Any]:
    """A state dict with this rank's parts in the place of whole tensors.

    Args:
        values: by any name.
        shards: by canonical name.
        names: any name -> canonical name.
    """
    found = dict(values)
    for name, value in values.items():
        shard = shards.get(names.get(name, name))
        if shard is not None and tuple(value.shape) == shard.whole:
            found[name] = shard.take(value)
    return found


def check_wholes(
    values: Mapping[str, Any], shards: Mapping[str, Shard], names: Mapping[str, str]
) -> None:
    """Checks that a state dict has whole tensors: a part of one may be that of a smaller model.

    Args:
        values: by any name.
        shards: by canonical name.
        names: any name -> canonical name.

    Raises:
        RuntimeError: a tensor has another shape; in the words of torch.
    """
    wrong = [
        f"\n\tsize mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {torch.Size(shard.whole)}, of which each of {shard.size} "
        f"ranks has a part."
        for name, value in values.items()
        if (shard := shards.get(names.get(name, name))) is not None
        and isinstance(value, torch.Tensor)
        and tuple(value.shape) != shard.whole
    ]
    if wrong:
        raise RuntimeError(f"Error(s) in loading state_dict:{''.join(wrong)}")


def refuse_with_shards(what: str, size: int) -> None:
    """Checks that tensors are whole, before a call or setting that would take parts for wholes.

    Raises:
        ConfigError: the degree is above 1.
    """
    if size > 1:
        raise ConfigError(
            f"{what} does not go with tensor_parallel_degree: {size} yet, where ranks hold parts "
            f"of tensors. Leave it out, or set tensor_parallel_degree: 1; model.state_dict() gives "
            f"whole tensors."
        )


def _give_values(group: Members, done: set[int], path: str, module: nn.Module) -> None:
    """Gives the tensors of a module the values of the first rank; delayed ones are made now.

    Parts of different wholes would fit nowhere. Layers are split one by one, so that only one
    whole tensor of those that are split is there at a time. `done` are the identities of tensors
    that have such values. All ranks of the group call it.
    """
    names = [*module.named_parameters(path), *module.named_buffers(path)]
    for name, tensor in names:
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        value = materialize(name, tensor)
        given = group.transport.broadcast(value, group.ranks[0], group.ranks).result()
        given = given.to(value.dtype).view(value.shape)
        if not tensor.is_meta:
            tensor.data = given
        else:  # the same object, with storage
            is_parameter = isinstance(tensor, nn.Parameter)
            made = nn.Parameter(given, tensor.requires_grad) if is_parameter else given
            torch.utils.swap_tensors(tensor, made)


def _is_enabled(model: nn.Module, unit: Unit) -> bool:
    """What the innermost modules around the layers of a unit say, or else the model itself."""
    switches = [_switch_at(model, entry.path) for entry in unit.entries]
    return all(unit.is_asked_for if s is None else s.is_on for s in switches)


def _switch_at(model: nn.Module, path: str) -> _Switch | None:
    """What the innermost module on the way to one says."""
    found: _Switch | None = vars(model).get(_SWITCH)
    for name in path.split(".") if path else ():
        model = model.get_submodule(name)
        found = vars(model).get(_SWITCH, found)
    return found


def _report(model: nn.Module, units: Sequence[Unit], size: int, index: int) -> None:
    """Log lines of the first rank of the group: what is split, and what stays whole and why."""
    if index > 0:
        return
    done = [unit for unit in units if unit.problem is None]
    get_logger().info(
        "tensor parallelism: split %d of %d units of %s over %d ranks",
        len(done),
        len(units),
        type(model).__name__,
        size,
    )
    for reason, paths in _by_problem(units).items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        get_logger().warning(
            "tensor parallelism: %s%s stays whole on every rank: %s", paths[0], more, reason
        )
    if not units:
        get_logger().warning(
            "tensor parallelism: nothing is split. Call smp.set_tensor_parallelism(model) before "
            "smp.DistributedModel; it knows the models of transformers that have a tp_plan, GPT-2, "
            "BERT, RoBERTa and ViT."
        )


def _by_problem(units: Iterable[Unit]) -> dict[str, list[str]]:
    """Reason -> paths of the units that it keeps whole; reasons of blocks differ by a number."""
    found: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for unit in units:
        if unit.problem is not None:
            kind = "".join(c for c in unit.problem if not c.isdigit())
            found.setdefault(first.setdefault(kind, unit.problem), []).append(unit.path)
    return found
