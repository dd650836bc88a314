"""Running one rank's list of actions.

One handler per kind of action; the list decides the order, so this file knows nothing about
schedules. Executions are asynchronous: a handler starts a program and goes on. The only waits are
for messages that have not arrived when a program needs them.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mpxla.comm.stall import Progress
from mpxla.device.backend import Backend, Executable
from mpxla.errors import MpxlaError
from mpxla.runtime.buffers import LiveValues
from mpxla.runtime.host_copies import HostCopies
from mpxla.runtime.link import Arrival, PipelineLink
from mpxla.runtime.plans.activations import PlannedStage
from mpxla.runtime.watching.recorder import Recorder, Wait
from mpxla.schedule.action import Action, Op, microbatch_of, peer_of
from mpxla.schedule.copies import has_copies, offloads_done
from mpxla.stage.spec import TensorSpec, Transfer

__all__ = ["CompiledStage", "Executor", "StepRun"]


@dataclass(frozen=True, kw_only=True)
class CompiledStage(PlannedStage):
    """A stage that this rank runs: its lowering and its executables.

    A backward is one program, or two if the schedule splits it. `prepare` gives the transposes of
    weights that the forward takes last, and `finish` turns transposed accumulators round. Whether
    programs are worth a rehearsal, see `Executor`, is known when they are compiled.
    """

    forward: Executable
    backward: Executable | None = None
    input_part: Executable | None = None
    weight_part: Executable | None = None
    prepare: Executable | None = None
    finish: Executable | None = None
    is_rehearsed: bool = False

    @functools.cached_property
    def own_bytes(self) -> tuple[int, ...]:
        """Bytes of the backward's arguments after the accumulators.

        0 for those that do not exist once per microbatch: parameters, and the objectives' seed.
        """
        lowered = self.lowered
        spec = lowered.spec
        owns = [s.argument is None or spec.is_of_microbatch(s.argument) for s in lowered.saved]
        specs = lowered.backward_inputs[lowered.num_accumulators :]
        owns += [True] * len(lowered.grad_ports) + [False]
        return tuple(s.num_bytes if own else 0 for s, own in zip(specs, owns, strict=True))

    @property
    def programs(self) -> tuple[Executable, ...]:
        """All executables."""
        found = (self.forward, self.backward, self.input_part, self.weight_part)
        found += (self.prepare, self.finish)
        return tuple(program for program in found if program is not None)


@dataclass
class StepRun:
    """State of one running step on one rank.

    Attributes:
        tensors: this rank's parameters, buffers and constants by name, on the device. Buffers are
            replaced as the stages change them.
        inputs: tensor leaves of each microbatch (only where stage 0 lives).
        seeds: random seed of every (stage, microbatch) on the device; empty without random ops.
        objective_seeds: gradient of the objectives, one element on the device, by dtype.
        zeros: gives zero accumulators, one per spec; a backward may take their memory.
        accumulators: gradients so far, by (stage, parameter name).
        results: values of the step's results, by (result index, microbatch).
        prepared: transposed weights, by stage.
        num_tasks: how many forwards and backwards were started.
        copies: moves saved values to the host and back, if the schedule says so.
        recorder: notes what runs when, while a profile is taken.
        progress: knows the running action, for the case that nothing moves any more.
    """

    tensors: dict[str, torch.Tensor]
    inputs: Mapping[int, Sequence[torch.Tensor]]
    seeds: Mapping[tuple[int, int], torch.Tensor]
    objective_seeds: Mapping[torch.dtype, torch.Tensor]
    zeros: Callable[[Sequence[TensorSpec]], list[torch.Tensor]]
    accumulators: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    prepared: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    values: LiveValues = field(default_factory=LiveValues)
    num_tasks: int = 0
    copies: HostCopies | None = None
    recorder: Recorder | None = None
    progress: Progress = field(default_factory=Progress)

    def release(self) -> None:
        """Lets go of all values: after a step, only what it counted is looked at."""
        self.tensors, self.inputs, self.seeds, self.objective_seeds = {}, {}, {}, {}
        self.accumulators, self.results, self.prepared = {}, {}, {}
        self.copies = None


class Executor:
    """Runs the actions of one rank for one compiled step.

    `on_reduce` is called with a stage whose gradients are complete. `input_leaves` tells which
    values that a stage reads are step inputs: stage -> name -> leaf. The backend is for schedules
    that move saved values to the host, and for rehearsals.

    Some programs take twice as long when they run first, and what ranks compute first waits for
    each other: forwards from the first stage to the last one, then backwards. So a rank that waits
    for the first input of such a program runs it on zeros meanwhile, and drops the results.
    """

    def __init__(
        self,
        stages: Mapping[int, CompiledStage],
        forward_transfers: Sequence[Transfer],
        backward_transfers: Sequence[Transfer],
        link: PipelineLink,
        on_reduce: Callable[[int, StepRun], None],
        input_leaves: Mapping[int, Mapping[str, int]],
        backend: Backend | None = None,
    ):
        self._backend = backend
        self._input_leaves = input_leaves
        self._stages = stages
        self._forward = {(t.source, t.target): t for t in forward_transfers}
        self._backward = {(t.source, t.target): t for t in backward_transfers}
        self._link = link
        self._on_reduce = on_reduce
        self._held: dict[tuple[str, int, int], torch.Tensor] = {}
        self._have_run: set[tuple[Op, int]] = set()
        self._handlers: dict[Op, Callable[[Action, StepRun], None]] = {
            Op.FORWARD: self._run_forward,
            Op.BACKWARD: self._run_backward,
            Op.INPUT_GRADIENT: self._run_input_gradient,
            Op.WEIGHT_GRADIENT: self._run_weight_gradient,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_FORWARD: self._receive_forward,
            Op.SEND_BACKWARD: self._send_backward,
            Op.RECV_BACKWARD: self._receive_backward,
            Op.OFFLOAD: self._offload,
            Op.LOAD: self._load,
            Op.REDUCE: self._reduce,
        }

    def run(self, actions: Sequence[Action], step: StepRun) -> None:
        """Runs all actions in order. Every rank of the pipeline must run its own list.

        Raises:
            MpxlaError: with a note that names the action that failed.
        """
        self._held = {}
        if not has_copies([actions]):
            self._run_all(actions, step, {})
            return
        assert self._backend is not None, "who runs such schedules gives it"
        note = None if step.recorder is None else step.recorder.note_copy
        with contextlib.closing(HostCopies(step.values, self._backend, note)) as step.copies:
            self._run_all(actions, step, offloads_done(actions))

    def _run_all(
        self, actions: Sequence[Action], step: StepRun, done: Mapping[int, Sequence[Action]]
    ) -> None:
        """Runs actions; `done` says which offloads have to be complete before each of them."""
        step.progress.begin(actions, self._describe)
        if 0 not in self._stages:  # the first inputs are still being computed elsewhere
            for stage in self._stages.values():
                self._prepared(stage, step)
        for index, action in enumerate(actions):
            step.progress.at(index)
            current = action
            try:
                for current in done.get(index, ()):
                    if self._saves(current):
                        _copies(step).complete(current)
                current = action
                if step.recorder is not None:
                    handler = functools.partial(self.run_action, action, step)
                    step.recorder.run(action, handler, step.values)
                else:
                    self.run_action(action, step)
            except MpxlaError as error:
                error.add_note(_where(current))
                raise
            except RuntimeError as error:
                raise MpxlaError(f"{error}\n{_where(current)}") from error
        step.progress.end()

    def run_action(self, action: Action, step: StepRun) -> None:
        """Runs one action, or starts its program."""
        if action.op.is_compute:
            if (action.op, action.stage) not in self._have_run:
                self._have_run.add((action.op, action.stage))
                self._rehearse(action, step)
            step.num_tasks += 1
        self._handlers[action.op](action, step)

    def _rehearse(self, action: Action, step: StepRun) -> None:
        """Runs a program before its first input is there; see the class."""
        is_profiled = step.recorder is not None
        if not self._stages[action.stage].is_rehearsed or step.copies is not None or is_profiled:
            return
        assert self._backend is not None, "it says that programs build late"
        values = step.values.rehearsal(action.stage, microbatch_of(action), self._backend)
        if values is not None:
            # What it hands on is replaced by what the action itself does, right after this.
            own = {"accumulators": {}, "results": {}, "tensors": dict(step.tensors)}
            self._handlers[action.op](action, replace(step, values=values, **own))

    def _run_forward(self, action: Action, step: StepRun) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        spec = stage.lowered.spec
        arguments = [step.tensors[name] for name in spec.parameters]
        arguments += [step.tensors[name] for name in (*spec.buffers, *spec.constants)]
        for port in spec.inputs:
            if port.source is None and 0 in self._stages:
                arguments.append(step.inputs[microbatch][port.leaf])
            else:
                arguments.append(step.values.take(port.name, spec.index, microbatch))
        arguments += self._prepared(stage, step)
        outputs = stage.forward(arguments, step.seeds.get((spec.index, microbatch)))
        self._deliver_outputs(stage, microbatch, outputs, step)
        if stage.lowered.backward is not None:
            saved_outputs = outputs[len(outputs) - stage.lowered.num_saved :]
            saved = [s.among(arguments, saved_outputs) for s in stage.lowered.saved]
            step.values.save(spec.index, microbatch, saved, stage.own_bytes[: len(saved)])

    def _prepared(self, stage: CompiledStage, step: StepRun) -> list[torch.Tensor]:
        """Transposed weights of a stage, computed once per step."""
        if stage.prepare is None:
            return []
        index = stage.lowered.spec.index
        if index not in step.prepared:
            names = stage.lowered.spec.parameters
            weights = [step.tensors[names[i]] for i in stage.lowered.transposed_weights]
            step.prepared[index] = stage.prepare(weights)
        return step.prepared[index]

    def _deliver_outputs(
        self, stage: CompiledStage, microbatch: int, outputs: list[torch.Tensor], step: StepRun
    ) -> None:
        spec = stage.lowered.spec
        remaining = iter(outputs)
        for port in spec.outputs:
            value = next(remaining)
            for consumer in port.consumers:
                if consumer in self._stages:
                    step.values.put(port.name, consumer, microbatch, value)
                else:
                    self._held[port.name, consumer, microbatch] = value
        for index in spec.results:
            step.results[index, microbatch] = next(remaining)
        for name in spec.new_buffers:
            step.tensors[name] = next(remaining)

    def _run_backward(self, action: Action, step: StepRun) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        if stage.backward is None:
            return
        lowered = stage.lowered
        arguments = _backward_arguments(stage, microbatch, step)
        outputs = stage.backward([*_accumulators(stage, step), *arguments])
        step.values.release(action.stage, microbatch)
        step.accumulators[action.stage] = outputs[: lowered.num_accumulators]
        self._deliver_gradients(stage, microbatch, outputs[lowered.num_accumulators :], step)

    def _run_input_gradient(self, action: Action, step: StepRun) -> None:
        """Runs the first part; what the second one reads takes the place of the saved values."""
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        split = stage.split
        if split is None:
            return
        arguments = _backward_arguments(stage, microbatch, step)
        crossing: list[torch.Tensor] = []
        if stage.input_part is not None:
            assert split.input_part is not None, "it is what was compiled"
            outputs = stage.input_part([arguments[i] for i in split.input_part.arguments])
            crossing = outputs[split.num_input_grads :]
            self._deliver_gradients(stage, microbatch, outputs[: split.num_input_grads], step)
        places = split.weight_part.arguments if split.weight_part else ()
        kept = [arguments[i] for i in places]
        sizes = [stage.own_bytes[i] for i in places] + [value.nbytes for value in crossing]
        step.values.save(action.stage, microbatch, [*kept, *crossing], sizes)

    def _run_weight_gradient(self, action: Action, step: StepRun) -> None:
        stage = self._stages[action.stage]
        if stage.split is None:
            return
        kept = step.values.restore(action.stage, microbatch_of(action))
        if stage.weight_part is not None:
            step.accumulators[action.stage] = stage.weight_part(
                [*_accumulators(stage, step), *kept]
            )
        step.values.release(action.stage, microbatch_of(action))

    def _deliver_gradients(
        self,
        stage: CompiledStage,
        microbatch: int,
        grads: Sequence[torch.Tensor],
        step: StepRun,
    ) -> None:
        spec = stage.lowered.spec
        ports = [port for port in spec.inputs if port.has_grad]
        for port, grad in zip(ports, grads, strict=True):
            name = _grad_name(port.name, spec.index)
            assert port.source is not None, "inputs of the step have no gradients"
            if port.source in self._stages:
                step.values.put(name, port.source, microbatch, grad)
            else:
                self._held[name, port.source, microbatch] = grad

    def _send_forward(self, action: Action, step: StepRun) -> None:
        peer, microbatch = peer_of(action), microbatch_of(action)
        transfer = self._forward[action.stage, peer]
        inputs = self._input_leaves[peer] if action.stage == 0 else {}
        tensors = [
            step.inputs[microbatch][inputs[name]]
            if name in inputs
            else self._held.pop((name, peer, microbatch))
            for name in transfer.names
        ]
        self._link.send(tensors, transfer, "forward")

    def _receive_forward(self, action: Action, step: StepRun) -> None:
        transfer = self._forward[peer_of(action), action.stage]
        arrival = _observed(self._link.receive(transfer, "forward"), action, step.recorder)
        place = action.stage, microbatch_of(action)
        step.values.expect(transfer.names, transfer.specs, *place, arrival)

    def _send_backward(self, action: Action, step: StepRun) -> None:
        peer, microbatch = peer_of(action), microbatch_of(action)
        transfer = self._backward[action.stage, peer]
        tensors = [
            self._held.pop((_grad_name(name, action.stage), peer, microbatch))
            for name in transfer.names
        ]
        self._link.send(tensors, transfer, "backward")

    def _receive_backward(self, action: Action, step: StepRun) -> None:
        peer = peer_of(action)
        transfer = self._backward[peer, action.stage]
        arrival = _observed(self._link.receive(transfer, "backward"), action, step.recorder)
        names = tuple(_grad_name(name, peer) for name in transfer.names)
        place = action.stage, microbatch_of(action)
        step.values.expect(names, transfer.specs, *place, arrival)

    def _describe(self, action: Action) -> str:
        """An action with the shapes of what it moves."""
        if action.peer is None:
            return str(action)
        edge, other = (action.stage, action.peer), (action.peer, action.stage)
        is_forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        transfers = self._forward if is_forward else self._backward
        transfer = transfers.get(edge if action.op.is_send else other)
        if transfer is None:
            return str(action)
        shapes = ", ".join(str(list(spec.shape)) for spec in transfer.specs)
        return f"{action} {shapes}"

    def _saves(self, action: Action) -> bool:
        """Whether the forward has saved something: a stage that is frozen has no backward."""
        return self._stages[action.stage].lowered.backward is not None

    def _offload(self, action: Action, step: StepRun) -> None:
        if self._saves(action):
            there_anyway = step.inputs[microbatch_of(action)] if step.inputs else ()
            _copies(step).offload(action, there_anyway)

    def _load(self, action: Action, step: StepRun) -> None:
        if self._saves(action):
            _copies(step).load(action)

    def _reduce(self, action: Action, step: StepRun) -> None:
        stage = self._stages[action.stage]
        if stage.finish is not None and action.stage in step.accumulators:
            accumulators = step.accumulators[action.stage]
            turned = stage.lowered.transposed_gradients
            results = stage.finish([accumulators[i] for i in turned])
            for position, value in zip(turned, results, strict=True):
                accumulators[position] = value
        self._on_reduce(action.stage, step)


def _observed(
    arrival: Arrival, action: Action, recorder: Recorder | None
) -> Callable[[], list[torch.Tensor]]:
    """The same wait for a message, noted by the recorder if there is one."""
    if recorder is None:
        return arrival

    def wait() -> list[torch.Tensor]:
        begin = time.monotonic()
        arrived = arrival.when_arrived()
        values = arrival()
        recorder.note_wait(Wait(peer_of(action), begin, arrived, time.monotonic()))
        return values

    return wait


def _copies(step: StepRun) -> HostCopies:
    assert step.copies is not None, "`run` makes them where a schedule has copies"
    return step.copies


def _accumulators(stage: CompiledStage, step: StepRun) -> list[torch.Tensor]:
    """Gradients of the stage so far; zeros before its first backward."""
    lowered = stage.lowered
    found = step.accumulators.get(lowered.spec.index)
    if found is None:
        found = step.zeros(lowered.accumulators)
    return found


def _backward_arguments(
    stage: CompiledStage, microbatch: int, step: StepRun
) -> list[torch.Tensor | None]:
    """Arguments of the backward after the accumulators: saved, gradients of outputs, seed."""
    spec = stage.lowered.spec
    grads = [
        step.values.take(_grad_name(spec.outputs[port].name, source), spec.index, microbatch)
        for port, source in stage.lowered.grad_ports
    ]
    saved = step.values.restore(spec.index, microbatch)
    return [*saved, *grads, step.objective_seeds[stage.lowered.backward_inputs[-1].dtype]]


def _grad_name(value: str, stage: int) -> str:
    """Key of the gradient of `value` that comes from `stage`."""
    return f"d {value} by {stage}"


def _where(action: Action) -> str:
    place = f"stage {action.stage}"
    if action.microbatch is not None:
        place += f", microbatch {action.microbatch}"
    return f"mpxla: while running {action} ({action.op.name.lower()} of {place})."
