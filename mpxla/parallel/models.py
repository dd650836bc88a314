"""The distributed models of a session: one engine runs them, in steps that use one or several.

Made with the first `DistributedModel`. What concerns all models is here; what belongs to one of
them is the model's own.
"""

import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.comm.transport import Group
from mpxla.errors import ConfigError, MpxlaError, PeerFailure, RankMismatch
from mpxla.graph.partition.report import format_report
from mpxla.graph.tensor.varying import split_parameters
from mpxla.graph.user_code import at_user_line
from mpxla.log import get_logger
from mpxla.parallel.copies import lending
from mpxla.parallel.gradients.combined import ModelReducers
from mpxla.parallel.gradients.loss_scale import Unscaling
from mpxla.parallel.gradients.norms import GradientNorm
from mpxla.parallel.gradients.reducer import GradientReducer, ReductionOptions
from mpxla.parallel.gradients.rounds import Rounds
from mpxla.parallel.programs import Programs
from mpxla.parallel.replica import Replica
from mpxla.parallel.store import ParameterStore
from mpxla.parallel.updates.groups import parameters_of
from mpxla.runtime.engine import StepEngine
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.states import Member
from mpxla.runtime.watching.metrics import MetricsFile
from mpxla.session import Session, current

if TYPE_CHECKING:
    from mpxla.parallel.model import DistributedModel

__all__ = ["Models", "cut_report", "models_of"]


def models_of(session: Session) -> "Models":
    """Those of a session; made with the first call."""
    if session.models is None:
        session.models = Models(session)
    return session.models


class Models:
    """All models that were wrapped since `init`; they stay until `shutdown`.

    A model that the script drops keeps its memory until then: compiled steps refer to it.

    Attributes:
        sees_all: whether this rank's optimizers hold what all ranks have, see `others`.
    """

    def __init__(self, session: Session):
        self._session = session
        topology, rank = session.topology, session.rank
        pipeline = topology.pp_group(rank)
        self._link = PipelineLink(session.transport, pipeline, session.backend)
        # Ranks that share tensors have equal gradients of what is whole on each of them.
        self._rounds = Rounds(session.transport, session.objects, topology.rdp_group(rank))
        self._reducers = ModelReducers(self._rounds)
        self._members: dict[str, DistributedModel] = {}
        self._joined: list[GradientReducer] = []
        self.sees_all = False
        self.engine = StepEngine(session, self._link, self._reducers)
        if session.config.metrics_dir is not None:
            folder = Path(session.config.metrics_dir)
            file = MetricsFile(folder, rank, session.env.world_size, self.engine.status)
            session.exchanged.callback(file.close)
        world = topology.world_group()
        self.gradient_norm = GradientNorm(
            self._reducers,
            session.transport,
            session.backend,
            topology.mp_group(rank),
            world,
            self._counts,
        )

    def _counts(self, label: str, name: str) -> bool:
        """Whether this rank counts a parameter: its own part, or a whole one once per group."""
        topology, rank, model = self._session.topology, self._session.rank, self._members[label]
        is_own = topology.tp_rank(rank) == 0 or name in model.shards_of_tensors
        if topology.sdp == 1 or not self.gradient_norm.is_divided:
            return is_own
        is_part = name in model.tensors.gradient_shards  # all ranks clip together
        return is_own and topology.rdp_rank(rank) < (topology.sdp if is_part else 1)

    def __iter__(self) -> Iterator["DistributedModel"]:
        return iter(self._members.values())

    def add(
        self, model: "DistributedModel", member: Member, options: ReductionOptions
    ) -> tuple[str, GradientReducer]:
        """Takes in a model; gives its label, and what reduces its gradients."""
        session = self._session
        label = self.engine.add(member)
        replica = Replica(
            session.transport,
            session.objects,
            session.topology.rdp_group(session.rank),
            session.topology.sdp_replicas(session.rank),
            session.topology.pp_rank(session.rank),
            self._link,
            ParameterStore(
                member.state,
                session.backend,
                torch.float32 if session.config.has_masters else None,
                lends_gradients=not session.config.fp16,  # where they have the loss scale
            ),
        )
        reducer = GradientReducer(
            replica,
            options,
            model.optimizer_settings,
            model.begin_with_loss_scale,
            self._rounds,
            label,
            functools.partial(self.engine.names_of, label),
        )
        self._reducers.add(reducer)
        self._members[label] = model
        return label, reducer

    def only(self, what: str) -> "DistributedModel":
        """The model, where there is one; `what` is called without saying which.

        Raises:
            MpxlaError: there are several.
        """
        if len(self._members) > 1:
            raise MpxlaError(
                f"{what} was called without model=, and this script has {len(self._members)} "
                f"distributed models; say which of them is meant."
            )
        return next(iter(self._members.values()))

    def holding(self, parameters: Iterable[torch.Tensor]) -> list["DistributedModel"]:
        """The models that have some of these parameters, or pieces of them."""
        given = {id(parameter) for parameter in parameters}
        return [model for model in self if not given.isdisjoint(model.parameter_ids())]

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list["DistributedModel"]:
        """The models whose parameters an optimizer holds; the only one in any case.

        An optimizer of the parameters of one rank may have none there, and goes with all models.

        Raises:
            MpxlaError: it holds other parameters only.
        """
        self.engine.arrivals.take_in()
        given, known = parameters_of(optimizer), list(self)
        found = self.holding(given)
        if not found and given and len(known) > 1:
            raise MpxlaError(
                f"the {type(optimizer).__name__} given to smp.DistributedOptimizer holds "
                f"parameters of none of the {len(known)} distributed models; build it from those "
                f"of the model that it is to train."
            )
        return found or known

    @functools.cached_property
    def unscaling(self) -> Unscaling:
        """Divides gradients by loss scales, on all ranks together."""
        session = self._session
        world = session.topology.world_group()
        return Unscaling(Programs(session.backend), session.transport, world)

    def placed_with(self, module: nn.Module) -> "DistributedModel | None":
        """The model that has a module and is partitioned already, if there is one."""
        found = (m for m in self if any(part is module for part in m.module.modules()))
        return next((model for model in found if model.partitioned), None)

    def unscale(self) -> None:
        """Divides gradients by the loss scales of all optimizers; all ranks must call it."""
        for optimizer in self._optimizers():
            optimizer.unscale()

    def _optimizers(self) -> list[Any]:
        """Those of all models, each once."""
        return list({id(o): o for model in self for o in model.optimizers}.values())

    @property
    def is_any_placed(self) -> bool:
        """Whether some model is partitioned."""
        return any(model.partitioned for model in self)

    @contextlib.contextmanager
    def together(self, what: str, ranks: Group) -> Generator[None]:
        """Around a call of the user that several ranks make together, after partitioning.

        A rank that does something else meanwhile (the next step, the end of the script) is an error
        on all ranks that names the call and its line. The ranks are global: those of the pipeline,
        or more.

        Raises:
            RankMismatch: another rank does something else.
        """
        session, line = current(), at_user_line()  # an error after smp.shutdown()
        try:
            self.engine.calls.meetings.pipeline(what, line)
            if set(ranks) - set(session.topology.pp_group(session.rank)):
                if session.topology.pp_rank(session.rank) == 0:  # as before every step call
                    self.engine.calls.sharded.compare(what, None, line)
                self._rounds.meet(what, line)
            yield
        except RankMismatch as error:
            session.report_failure(what, error)
            raise
        except PeerFailure as error:
            if what in str(error):
                raise
            raise PeerFailure(
                f"{error} Rank {session.rank} was in {what}{line} then, which the ranks "
                f"{list(ranks)} have to call together."
            ) from error

    def run_step(self, rule: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a step function; called by `smp.step`."""
        for model in self:
            model.begin_step()
        known = set(self.engine.first_cuts)
        copies, args, kwargs = lending(args, kwargs)
        with contextlib.ExitStack() as stack:
            for copy in copies:
                stack.enter_context(copy.lent())
            lent = {copy.original.label for copy in copies}
            result = self.engine.call(rule, args, kwargs, lent)
        new = [cut for label, cut in self.engine.first_cuts.items() if label not in known]
        if new and self._session.rank == 0:
            get_logger().info("%s", cut_report(new[0]))  # one step cut all of them
        for label in self.engine.last_used:
            self._members[label].end_step()
        return result

    def tell_of_update(self, what: str) -> None:
        """Before an update that replicas divide: one that waits in another call learns of it."""
        self._rounds.tell_of_update(what, at_user_line())

    # --- uneven batches -------------------------------------------------------------------------

    @contextlib.contextmanager
    def joined(self, reducer: GradientReducer) -> Generator[None]:
        """While a model is in `join`: replicas meet for all models; after the last, they wait.

        After an error in the loop, nobody is waited for.

        Raises:
            ConfigError: together with what needs all replicas in every step.
        """
        problems = {
            "inside another model.join()": reducer in self._joined,
            "with shard_optimizer_state: True, where every update needs all replicas": (
                reducer.options.is_sharded
            ),
            "with a comm hook, which replicas without batches cannot call": any(
                other.hook is not None for other in self._reducers
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ConfigError(f"model.join() was used {problem}.")
        if not self._joined:
            self._rounds.begin_join()
        self._joined.append(reducer)
        is_orderly = False
        try:
            yield
            is_orderly = True
        finally:
            self._joined.remove(reducer)
            source = None if self._joined else self._rounds.end_join(is_orderly)
            if source is not None:
                self._take_over(source)

    def _take_over(self, source: int) -> None:
        """All replicas take the values of one of them."""
        for reducer in self._reducers:
            reducer.take_over(source)
        for optimizer in self._optimizers():
            optimizer.take_over(source)

    def end_training(self) -> None:
        """Called when the session ends: all replicas have to have trained equally long."""
        self._rounds.leave()


def cut_report(cut: CutStep) -> str:
    """Table of the stages of a step: modules, parameters, operations, sizes, as a rank has them."""
    problem = cut.problem
    return format_report(
        cut.partition,
        flops=problem.total_flops,
        in_flight=cut.in_flight,
        weight_bytes=problem.weight_bytes,
        split=split_parameters(cut.step),
    )
