"""From a call of a step function to the step in stages, and the keys that are chosen on the way.

The ranks of a pipeline cut the same step in the same way: what only one of them can know (values of
inputs, measured times, the choice of a schedule) the first rank tells the others. This module must
not know how stages are compiled or run.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from mpxla.config import Config
from mpxla.errors import MpxlaError, PartitionError
from mpxla.graph.cost import MachineModel
from mpxla.graph.indices import with_extremes
from mpxla.graph.partition.modules import joined_path
from mpxla.graph.partition.words import SavedTensor
from mpxla.graph.placement import check_placement
from mpxla.graph.python.numbers_of_ways import LeftNames
from mpxla.graph.python.plain import Read
from mpxla.graph.python.state import PythonState
from mpxla.graph.stepgraph import OutputKind, StepGraph, without_inputs
from mpxla.graph.tensor.sequence import divide_sequences
from mpxla.graph.tensor.split_dims import check_split_dims
from mpxla.graph.tensor.varying import gathered_parameters, mark_varying
from mpxla.graph.tensor.vocabulary import divide_losses
from mpxla.log import get_logger, warn_once
from mpxla.runtime.call import Call
from mpxla.runtime.control import ControlChannel
from mpxla.runtime.placement import Placement
from mpxla.runtime.plans.automatic import (
    bytes_of_divided,
    choose,
    device_bytes,
    free_keys,
    heaviest_nodes,
    is_worth_choosing,
    with_keys,
)
from mpxla.runtime.plans.cut import CutStep, cut_step, weighs_memory
from mpxla.runtime.plans.kept_steps import KeptSteps
from mpxla.runtime.plans.rates import rates_of_job
from mpxla.runtime.signature import Signature
from mpxla.runtime.states import Member, ModelStates
from mpxla.runtime.tracing import Tracing
from mpxla.runtime.watching.sign_of_life import SignOfLife
from mpxla.session import Session
from mpxla.stage.timing import measure_operators

__all__ = ["StepCutter"]

_T = TypeVar("_T")
_GATHERED = (
    "the step function {} uses {} outside of the layers that have a part of each. It gets whole "
    "tensors there, as in plain PyTorch; every microbatch gathers them."
)
_PART_OF_LAYERS = (
    "mpxla: tensor_parallel_degree: {} gives this rank a part of the heads or columns of some "
    "layers. If this line needs all of them, leave the module whole: "
    "smp.set_tensor_parallelism(module, False) before smp.DistributedModel."
)


class StepCutter:
    """Captures and cuts steps for this rank.

    The engine adds members, by label. The configuration is for all batches of a step.

    Attributes:
        is_tracing: whether a step function is being captured.
        chosen: open keys of the configuration; None until a step has been cut.
        machine: rates by which steps are estimated.
    """

    def __init__(
        self,
        session: Session,
        kept: KeptSteps,
        states: ModelStates,
        members: Mapping[str, Member],
        placement: Placement,
        control: ControlChannel,
        life: SignOfLife,
        config: Config,
    ):
        self._session, self._states, self._members = session, states, members
        self._placement, self._control, self._life = placement, control, life
        self._sharing = session.topology.tp_group(session.rank)
        self._replicas = session.topology.rdp_group(session.rank)
        self._given = config
        self._kept = kept
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._has_room: bool | None = None
        """Whether whole parameters fit into every rank, once that has been planned."""
        # Ranks that gather a model's tensors would have to ask together.
        self._may_ask = len(session.topology.sdp_group(session.rank)) == 1
        self._decided: defaultdict[str, set[str]] = defaultdict(set)
        self._left: defaultdict[str, LeftNames] = defaultdict(LeftNames)
        self._rewritten: defaultdict[str, set[str]] = defaultdict(set)
        self._sized: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.is_tracing = False
        self.chosen: dict[str, Any] | None = None
        self.machine = MachineModel()

    @property
    def config(self) -> Config:
        """The given one with what was chosen."""
        return with_keys(self._given, self.chosen) if self.chosen else self._given

    def settle_rates(self) -> None:
        """Learns the job's rates; every rank calls it, before the first step is cut."""
        self.machine = rates_of_job(self._session)

    def cut(
        self, call: Call, function: Callable[..., Any]
    ) -> tuple[CutStep, Signature, list[Read]]:
        """The step in stages, the signature that it serves, and what it read of the model.

        Every rank of the pipeline must call it.
        """
        self.is_tracing = True
        try:
            tracing = Tracing(
                function,
                call.objects,
                self._states,
                functools.cache(lambda: self._values(call)),
                self._session.kept,
                PythonState(call.outside, self._left[call.signature.function]),
                self._decided[call.signature.function] if self._may_ask else None,
                self._replicas,
                rewritten=self._rewritten[call.signature.function],
                sized=self._sized[call.signature.function],
            )
            signature, step, reads = tracing.trace(call.signature, call.drawer, self._may_ask)
        except (RuntimeError, ValueError) as error:  # as shapes lead to; own errors say enough
            if self._parts() and not isinstance(error.__cause__ or error, MpxlaError):
                error.add_note(_PART_OF_LAYERS.format(len(self._sharing)))
            raise
        finally:
            self.is_tracing = False
        step = self._without_other_models(step)
        if len(self._sharing) > 1:
            place = self._sharing.index(self._session.rank), len(self._sharing)
            parts = self._parts()
            check_split_dims(step, {n: (dim, blocks) for n, (dim, _, _, blocks) in parts.items()})
            step = mark_varying(divide_losses(step), parts, *place)
            if names := gathered_parameters(step):
                which = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
                warn_once(f"gathered {names}", _GATHERED.format(call.signature.function, which))
            if self._given.optimize == "memory":
                step = divide_sequences(step, *place)
        if self._given.check_indices == "all":
            step = with_extremes(step)
        if not (self._given.auto_partition or self._given.load_partition):
            names = self._states.current_names()
            check_placement(step, self._pins(), self._given.default_partition, names)
        self._life.at("partition")
        return self.cut_captured(step, self._measure(step)), signature, reads

    def cut_captured(
        self,
        step: StepGraph,
        measured_s: Mapping[str, float] | None = None,
        saved: Mapping[str, tuple[SavedTensor, ...]] | None = None,
        fixed: Mapping[str, tuple[int, ...]] | None = None,
        config: Config | None = None,
    ) -> CutStep:
        """A captured step in stages.

        Times and what backwards keep are estimated where not given. `fixed` says where parameters
        live, and buffers that steps change; by default it is where they do.
        """
        stateful = self._placement.stateful
        if step.is_question:  # another way may change what it reads
            stateful |= self._placement.ranks.keys()
        config = config or self.config
        twins = self._placement.twins(step)
        beside = None
        if fixed is None:
            fixed, beside = self._placement.with_twins(twins), self._placement.ranks
        else:
            changed = {role.name for role in step.outputs if role.kind is OutputKind.BUFFER}
            stateful |= changed & fixed.keys()
        if saved is None and weighs_memory(config):
            saved = self._kept.saved(step)

        def cut(fixed: Mapping[str, tuple[int, ...]], twins: Mapping[str, str]) -> CutStep:
            return cut_step(
                step,
                config,
                self._session.backend.lowering,
                self._pins(),
                fixed or None,
                stateful,
                measured_s,
                saved,
                self.machine,
                twins,
            )

        try:
            return cut(fixed, twins)
        except PartitionError:
            if beside is None or beside == fixed:
                raise
        # Two models that look like copies of one may live where it cannot be cut.
        return cut(beside, {})

    def _values(self, call: Call) -> list[torch.Tensor]:
        """Tensor leaves of one microbatch, which the first pipeline rank tells the others."""
        if self._pp_rank > 0:
            return self._control.follow()
        values = self._session.backend.get(call.sample[0])
        self._control.announce(values)
        return values

    def _measure(self, step: StepGraph) -> dict[str, float] | None:
        """Seconds of the step's operators, the same on all ranks of the pipeline."""
        if not any(member.measures_times for member in self._members.values()):
            return None
        if self._pp_rank > 0:
            return self._control.follow()
        measured_s = measure_operators(step, self._session.backend)
        self._control.announce(measured_s)
        return measured_s

    # --- of the models --------------------------------------------------------------------------

    def _parts(self) -> dict[str, tuple[int, ...]]:
        """Parameters and buffers of which this rank has a part, with its place."""
        found: dict[str, tuple[int, ...]] = {}
        for label, member in self._members.items():
            found.update(self._states.from_own_names(label, member.split))
        return found

    def _pins(self) -> dict[str, int]:
        """Module path -> pipeline rank, of the modules that the user has placed."""
        pins: dict[str, int] = {}
        for label, member in self._members.items():
            path = self._states.path(label)
            pins.update(member.pins(joined_path("model", path)))
        return pins

    def _without_other_models(self, step: StepGraph) -> StepGraph:
        """The step without the parameters and buffers of models that it does not use."""
        labels = self._states.labels
        if len(labels) == 1:
            return step
        used = self._states.owners(step.names_in_use())
        others = [label for label in labels if label not in used]
        return without_inputs(step, {n for one in others for n in self._states.names_of(one)})

    # --- what is chosen -------------------------------------------------------------------------

    def may_choose(self, cut: CutStep) -> bool:
        """Whether keys are open for the first step; asked once, all keys are settled with it."""
        self.chosen, config = {}, self._given
        is_open = cut.step.is_training and bool(free_keys(config))
        return is_open and self._of_first(lambda: is_worth_choosing(cut, config, self.machine))

    def choose(self, cut: CutStep) -> dict[str, float] | None:
        """Chooses open keys: the first rank of a pipeline decides, the others follow.

        Every rank of the pipeline must call it, with the same cut.

        Returns:
            Measured seconds of operators, to cut again with.
        """
        if self._pp_rank > 0:
            self.chosen, measured_s = self._control.follow()
        else:
            self.chosen, measured_s = self._of_first(lambda: self._decide(cut))
            self._control.announce((self.chosen, measured_s))
        return measured_s

    def _of_first(self, find: Callable[[], _T]) -> _T:
        """What the first of the ranks that share tensors finds: no two measure the same times."""
        found = find() if self._session.rank == self._sharing[0] else None
        if len(self._sharing) > 1:
            found = self._session.objects.allgather(found, tuple(self._sharing))[0]
        return cast(_T, found)

    def _decide(self, cut: CutStep) -> tuple[dict[str, Any], dict[str, float] | None]:
        """The chosen keys, none of them if something fails, and measured seconds of operators."""
        session = self._session
        measures_all = any(member.measures_times for member in self._members.values())
        limit = device_bytes(session.backend.memory_counters(), session.env.local_size)

        def decide() -> tuple[str, dict[str, Any], dict[str, float]]:
            measured = None if measures_all else heaviest_nodes(cut.problem)
            measured_s = measure_operators(cut.step, session.backend, measured)
            saved = cut.saved or self._kept.saved(cut.step)
            found = choose(
                self._given,
                lambda config: self.cut_captured(cut.step, measured_s, saved, {}, config),
                limit,
                self.machine,
            )
            return found.line(limit), dict(found.keys), measured_s

        self._life.at("choice of the schedule")
        facts = self._given, self.machine, limit, session.env.local_size, measures_all, self._pins()
        try:
            line, keys, measured_s = self._kept.decision(cut.step, facts, decide)
        except Exception as error:  # a user's job goes on with what is documented
            get_logger().warning("no schedule was chosen, the defaults run: %r", error)
            return {}, None
        if session.rank == 0:
            get_logger().info("%s", line)
        return keys, measured_s

    def gathers_once(self, cut: CutStep) -> bool:
        """Whether divided parameters are whole for all of a step; the first one decides for all.

        Every rank must call it.
        """
        session, config = self._session, self.config
        if config.sdp_gather != "auto":
            return config.sdp_gather == "step"
        if self._has_room is None:
            limit = device_bytes(session.backend.memory_counters(), session.env.local_size)
            size = bytes_of_divided(cut, config, self._states.shards, gathers_once=True)
            everyone = session.objects.allgather(
                cut.step.is_training and size <= limit, session.topology.world_group()
            )
            self._has_room = all(everyone)
            if session.rank == 0:
                get_logger().info(
                    "sdp_gather: auto means %s: with whole parameters the fullest rank takes %.2g "
                    "of %.3g GiB",
                    "step" if self._has_room else "microbatch",
                    size / 2**30,
                    limit / 2**30,
                )
        return self._has_room
