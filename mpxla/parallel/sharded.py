"""Parameters, gradients and optimizer state divided over a group of replicas (ZeRO-3).

Every rank of a group of `sharded_data_parallel_degree` replicas has a part of each large parameter,
flat. Stage programs take the part and gather the rest (`stage/sharded.py`); what they give are
parts of gradients, which the inner optimizer sees on update copies. So the group acts as one
replica whose memory is that of all its ranks:

    rank 0   | w[0:5] |  gradient, state of w[0:5]  --+
                                                      |- reduced over groups
    rank 1   | w[5:9] |  gradient, state of w[5:9]    |
    rank 2   | w[0:5] |  ...                        --+

The model's own `nn.Parameter`s have no storage then. This file must not know how gradients are
reduced, nor optimizers.
"""

from collections.abc import Iterable
from typing import Any

from mpxla.errors import ConfigError, StepError
from mpxla.parallel.replica import Replica
from mpxla.runtime.state import ModelState
from mpxla.stage.spec import TensorSpec

__all__ = [
    "check_whole",
    "divide_over_group",
    "refuse_shared_parts",
    "refuse_with_divided_gradients",
]


def divide_over_group(replica: Replica) -> None:
    """Gives every rank its part of the values that the first replica has. All ranks call it.

    One parameter is whole at a time, on the host.
    """
    state, store = replica.state, replica.store
    for name in sorted(state.shards):
        holders = store.ranks.get(name, ())
        if replica.pp_rank not in holders or name in state.parts:
            continue
        sender = replica.group[0]
        value: Any = TensorSpec.of(state.parameters[name])
        if replica.rank == sender:
            value = state.whole_on_host(name)
        value = replica.transport.broadcast(value, sender, replica.group).result()
        first, *others = holders
        (value,) = replica.link.hand_over(first, others, [value]) or (value,)
        store.set_part(name, replica.backend.view(value))
    state.end_dividing()
    store.update_parts()


def check_whole(state: ModelState) -> None:
    """Checks that a model may be called outside of steps.

    Raises:
        StepError: its parameters are divided.
    """
    if state.shards:
        raise StepError(
            "the model was called outside a step function, and its parameters are divided over "
            "ranks (sharded_data_parallel_degree): call it in a function decorated with @smp.step "
            "(one that does not call model.backward serves for evaluation), or on all ranks in a "
            "block of model.summon_full_params()."
        )


def refuse_shared_parts(state: ModelState, others: Iterable[ModelState]) -> None:
    """Checks that nothing that is divided belongs to another model as well.

    Raises:
        ConfigError: something does.
    """
    known = {id(parameter) for other in others for parameter in other.parameters.values()}
    for name in state.gradient_shards:
        if id(state.parameters[name]) in known:
            key, off = _key_of(state)
            raise ConfigError(
                f"the parameter {name} belongs to an earlier smp.DistributedModel as well, which "
                f"does not go with {key} yet. Wrap one module that holds both models, or set {off}."
            )


def _key_of(state: ModelState) -> tuple[str, str]:
    """The key that divides what a rank holds, and how to switch it off."""
    if state.shards:
        return "sharded_data_parallel_degree", "sharded_data_parallel_degree: 1"
    return "shard_gradients", "shard_gradients: False"


def refuse_with_divided_gradients(what: str, state: ModelState) -> None:
    """Checks that gradients are whole, before a call `what` that would not see their parts.

    Raises:
        ConfigError: `sharded_data_parallel_degree` or `shard_gradients` divides some.
    """
    if state.shards:
        raise ConfigError(
            f"{what} does not go with sharded_data_parallel_degree yet, where ranks hold parts of "
            f"parameters. Leave it out, or set sharded_data_parallel_degree: 1; "
            f"model.state_dict() gives whole tensors."
        )
    if state.gradient_shards:
        raise ConfigError(
            f"{what} does not go with shard_gradients yet, where every backward divides gradients "
            f"over all replicas. Leave it out, or set shard_gradients: False."
        )
