"""The user's module as a whole, on the host: what saving it writes.

After partitioning, a rank holds a part of the module on its device. What people save it with (its
`state_dict()`, which `save_pretrained` of libraries calls as well; `torch.save` of the module or of
the `DistributedModel`) gives the values of all ranks instead, as plain host tensors. All ranks of a
replica make such a call together. `state_dict(keep_vars=True)` gives what this rank has, live.
"""

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.graph.capture.carried import forget_carried
from mpxla.graph.user_code import at_user_line
from mpxla.nn.layers import make_whole
from mpxla.parallel.state_dicts import PARTIAL_KEY, gather_full, to_host
from mpxla.session import Session, current, is_initialized

if TYPE_CHECKING:
    from mpxla.parallel.contents import PartitionedModule
    from mpxla.parallel.model import DistributedModel

__all__ = ["save_whole", "whole_copy", "whole_values"]

_HOOKS = "_state_dict_hooks"
_OWN = ("__reduce_ex__", "__deepcopy__")
_NONE_OF_ITS_OWN = (
    ("__reduce_ex__", object.__reduce_ex__),
    ("__reduce__", object.__reduce__),
    ("__deepcopy__", None),
)


def save_whole(model: "DistributedModel", session: Session) -> None:
    """Lets everything that saves the model's module write all of it.

    Pickling asks the object itself how, so the module gets that answer as an attribute, unless its
    class has one. Copies in memory stay what they were: of this rank's part.
    """
    module, reference = model.module, weakref.ref(model)

    def owner() -> "DistributedModel | None":
        """The model, unless its session has ended, or the module has whole tensors for now."""
        model = reference() if is_initialized() and current() is session else None
        return None if model is None or model.tensors.is_lent else model

    def gather(saved: nn.Module, values: dict[str, Any], prefix: str, metadata: Any) -> None:
        model = owner()
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        is_live = any(id(value) in own for value in values.values())
        if model is not None and model.partitioned and saved is module and not (prefix or is_live):
            values.update(model.state_dict())

    handle = module.register_state_dict_post_hook(gather)

    def without_own(content: dict[str, Any]) -> nn.Module:
        other = type(module).__new__(type(module))
        vars(other).update({k: v for k, v in content.items() if k not in _OWN})
        vars(other)[_HOOKS] = content[_HOOKS].copy()
        vars(other)[_HOOKS].pop(handle.id, None)
        return other

    def reduce(protocol: Any) -> Any:
        model = owner()
        saved = without_own(vars(module)) if model is None else whole_copy(model, session)
        return object.__reduce_ex__(saved, 2)

    def copied(memo: dict[int, Any]) -> nn.Module:
        other = memo[id(module)] = without_own(vars(module))
        vars(other).update(copy.deepcopy(vars(other), memo))
        return other

    if all(getattr(type(module), name, None) is plain for name, plain in _NONE_OF_ITS_OWN):
        vars(module).update(zip(_OWN, (reduce, copied), strict=True))


def whole_values(model: "PartitionedModule", session: Session, what: str) -> dict[int, Any]:
    """Copies of all parameters and buffers, whole and on the host, by the ids of the model's own.

    Without tensors in attributes that were computed of divided parameters, as no rank has values of
    these (`torch.nn.utils.weight_norm` leaves one; each forward makes it anew). All ranks of a
    replica make the call `what` of the user; all ranks of the job, if some parameters are divided.
    """
    state = model.tensors
    tensors: dict[str, torch.Tensor] = {**state.parameters, **state.buffers}
    values = {name: tensor.detach() for name, tensor in tensors.items()}
    if model.partitioned:
        # Of what was put into the model since its last step, all ranks have values.
        held = {name for name in values.keys() - state.parts.keys() if state.holds(name)}
        own = {
            name: value
            for name, value in values.items()
            if name in held and not (value.is_meta and state.is_carried(name))
        }
        group = session.topology.pp_group(session.rank)
        together = session.topology.world_group() if state.shards else group
        with model.together(what, together), session.gathering(what, group):
            state.check_divided()
            joined = {name: model.joined(name) for name in values if name in state.parts}
            local = {**to_host(own, session.backend), **joined, PARTIAL_KEY: True}
            values = gather_full(session.state_objects, group, local, list(values))
    values = model.with_whole_tensors(values)
    found: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if name not in values and state.is_carried(name):
            continue
        value = values[name].clone()
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        found[id(tensor)] = value
    return found


def whole_copy(model: "DistributedModel", session: Session) -> nn.Module:
    """A plain copy of the module on the host, without gradients. All ranks of a replica call it.

    All ranks of the job do, if some parameters are divided.
    """
    memo = whole_values(model, session, f"saving the model{at_user_line()}")
    whole = copy.deepcopy(model.module, memo)
    make_whole(whole)
    forget_carried(whole)
    return whole
