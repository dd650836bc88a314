"""The whole model on every rank for a while, between steps: to read, to write to, to call.

    with model.summon_full_params() as module:      all ranks
        torch.nn.utils.prune.l1_unstructured(module.head, "weight", amount=0.2)
        text = module.generate(ids)

The module gets host tensors with whole values in the places of its parameters and buffers, however
these are divided (stages, tensor parallelism, ZeRO-3); afterwards it gets its own again, with what
was written. (The name is that of PyTorch's FullyShardedDataParallel.)
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.comm.agreement import check_agreement
from mpxla.comm.transport import Group
from mpxla.errors import StepError
from mpxla.graph.capture.tensor_places import set_by_users
from mpxla.graph.user_code import at_user_line
from mpxla.nn.layers import whole_layers
from mpxla.parallel.replica import digest_of
from mpxla.parallel.whole import whole_values
from mpxla.runtime.state import with_versions
from mpxla.runtime.valueless import without_values
from mpxla.session import Session

if TYPE_CHECKING:
    from mpxla.parallel.contents import PartitionedModule

__all__ = ["summoned"]

_CALL = "model.summon_full_params()"


@contextlib.contextmanager
def summoned(model: "PartitionedModule", session: Session, writeback: bool) -> Generator[nn.Module]:
    """See `PartitionedModule.summon_full_params`."""
    state, line = model.tensors, at_user_line()
    if not model.partitioned:
        model.check_values(_CALL, {**state.parameters, **state.buffers})
    found = whole_values(model, session, f"{_CALL}{line}")
    held = {**state.parameters, **state.buffers}
    tensors = {name: found[id(own)] for name, own in held.items() if id(own) in found}
    before = _digests(tensors) if writeback else {}
    for name, parameter in state.parameters.items():
        vars(tensors[name]).update(set_by_users(parameter))
    with state.lent(found), whole_layers(model.module):
        yield model.module
        # A script may have put others there.
        tensors |= {name: value for name, value in state.buffers.items() if name in tensors}
    trained = [name for name, value in tensors.items() if value.grad is not None]
    if trained:
        raise StepError(
            f"the parameter {trained[0]} has got a gradient in {_CALL}{line}, which no optimizer "
            f"sees. Compute losses to train by in a function decorated with @smp.step; what needs "
            f"other gradients calls module.zero_grad() before the block ends."
        )
    if not writeback:
        return
    written = {name: d for name, d in _digests(tensors).items() if d != before.get(name)}
    topology, parameters = session.topology, state.parameters.keys()
    _check_alike(session, topology.world_group(), written, written.keys() & parameters)
    own = topology.mp_group(session.rank)  # replicas have buffers of their own
    _check_alike(session, own, written, written.keys() - parameters)
    _write(model, {name: tensors[name].detach() for name in written})


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of(value.detach()) for name, value in tensors.items()}


def _check_alike(
    session: Session, group: Group, written: Mapping[str, str], names: Iterable[str]
) -> None:
    """Checks that all ranks of a group have written the same; all of them call it."""
    check_agreement(
        session.state_objects,
        group,
        [f"{name}: {written[name]}" for name in sorted(names)],
        f"have written other values in {_CALL}",
        "Every rank has the whole model there, and writes to all of it. Seed what is random alike "
        "on all ranks (torch.manual_seed), or send the values of one rank to the others "
        "(smp.broadcast).",
    )


def _write(model: "PartitionedModule", values: dict[str, Any]) -> None:
    """Gives the model's own tensors whole values, by canonical name. All ranks call it."""
    state = model.tensors
    names = {name: now for name, now in state.names_now.items() if name in values}
    loaded = {now: values[name] for name, now in names.items() if name in state.parameters}
    if loaded:
        own: Any = model.module.state_dict(keep_vars=True)
        model.load_state_dict(with_versions(loaded, own._metadata), strict=False)
    for name in names.keys() - state.parameters.keys():
        own, value = state.buffer(name), values[name]
        if not state.holds(name):
            state.set_buffer(name, without_values(value))
        elif own is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
            own.detach().copy_(value)
        else:
            state.set_buffer(name, value)
