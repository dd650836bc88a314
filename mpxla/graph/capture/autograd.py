"""Capture of users' `torch.autograd.Function`s with the backward that they wrote.

Where the step function applies one, its `forward` (with `setup_context`) and its `backward` are run
once, one after the other, on tensors without values, and traced as one graph. The graph is cut
where the forward ends; what the backward reads from before is what it saves, whatever way `ctx`
holds it. One operator stands for both parts in the captured step (`functions.py`).

This module must not know how the step is captured or lowered.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx, nn, overrides
from torch._C import DisableTorchFunction
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, dispatch_functionalize
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import autograd_nodes
from mpxla.graph.containers import has_tensors
from mpxla.graph.exchanged import exchanged
from mpxla.graph.functions import PartialFunction, TracedFunction, operator_of
from mpxla.graph.normalize import has_writes
from mpxla.graph.replay import Replay
from mpxla.graph.split import copy_nodes
from mpxla.graph.stepgraph import is_random
from mpxla.graph.typed import outputs_of
from mpxla.graph.user_code import at_user_line

__all__ = [
    "DifferentiatesInsideError",
    "apply_captured",
    "bound",
    "has_own_setup",
    "own_containers",
]

_KnowAs = Callable[[torch.Tensor, torch.Tensor], None]
"""Makes known of one tensor what is known of the value of another."""


class DifferentiatesInsideError(Exception):
    """A function calls autograd itself, as reversible networks do in their backward."""


class _WritesError(Exception):
    """The forward changes arguments in place, without `ctx.mark_dirty`: places among tensors."""

    def __init__(self, places: list[int]):
        super().__init__()
        self.places = places


class _Context(FunctionCtx):
    """What `forward` and `backward` are given as `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What `save_for_backward` was given."""
        return tuple(self.to_save)

    saved_variables = saved_tensors

    def maybe_clear_saved_tensors(self) -> None:
        """Torch's own contexts free what they hold; this one lives as long as the trace."""


class _Traced:
    """The function as a graph: forward, then one node for every gradient, then backward.

    Only the results that are `used` have a gradient, if that is given.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        know_as: _KnowAs,
        used: Sequence[bool] | None = None,
    ):
        self._function, self._args, self._know_as, self._used = function, args, know_as, used
        leaves, self._spec = pytree.tree_flatten(args)
        self._sizes = [len(pytree.tree_leaves(argument)) for argument in args]  # a dict may grow
        self._leaves = leaves
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.results: Any = None
        self.has_gradient: list[bool] = []
        self.wants_zeros = True  # for results that have no gradient
        self._forward_names: set[str] = set()
        self.tensors = [leaves[i] for i in self._places]
        self.changed: list[int] = []
        self._gradients_outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._as_it_is = frozenset[int]()
        try:
            self._run()
            is_told_apart = self._encloses_arguments()
        except RuntimeError as error:
            if "to not have been used in the graph" not in str(error):
                raise
            is_told_apart = True
        if is_told_apart:
            self._as_it_is = frozenset(i for i, v in enumerate(self.tensors) if v.requires_grad)
            self._run()

    def _encloses_arguments(self) -> bool:
        """Whether the function reads arguments, or what was made of them, by other ways too.

        Its backward may differentiate what it computes of these with respect to the arguments, as
        checkpoints that are given a module and its parameters do. Stand-ins would have no part in
        it.
        """
        given = set(map(id, self.tensors))
        return any(
            id(tensor) in given or (tensor.requires_grad and not tensor.is_leaf)
            for tensor in self.outside
        )

    def _run(self) -> None:
        """Makes the graph, in the way that the function allows."""
        self._forward_names, self.changed = set(), []
        stand_ins = _stand_ins(self.tensors)
        try:
            module = self._trace(stand_ins, self._joint, is_composed=True)
        except DifferentiatesInsideError:
            module = self._trace(stand_ins, self._joint, is_composed=False)
        except _WritesError as error:
            self.changed = error.places
            module = None
        if module is not None and _has_rows(module.graph):
            module = self._trace(stand_ins, self._joint, is_composed=False)
        if module is None or has_writes(module.graph):
            # What was decided by values is decided: these tensors are of a kind that has none.
            written = self._joint if module is None else self._again(module)
            functional = dispatch_functionalize(written)
            try:
                module = self._trace(stand_ins, functional, is_composed=False)
            except RuntimeError as error:
                if "mutating a non-functional tensor" not in str(error):
                    raise
                raise self._problem(
                    "writes to a tensor that is none of its arguments, as batch norms do to their "
                    "statistics. Write to it outside of the function"
                ) from error
        self.graph = module.graph
        for node in [n for n in self.graph.nodes if n.target is torch._C._set_grad_enabled]:  # pyright: ignore[reportPrivateUsage]
            self.graph.erase_node(node)
        self.outside = _lifted(module, self._forward_names)

    def _again(self, module: fx.GraphModule) -> Callable[..., Any]:
        """What the graph computes, as a function that says again where the forward ends."""
        nodes = module.graph.nodes
        begin = next(
            n for n in nodes if n.op != "placeholder" and n.name not in self._forward_names
        )
        results = outputs_of(module.graph)[: len(self.has_gradient)]

        def run(*inputs: torch.Tensor) -> Any:
            with DisableTorchFunction():
                replay = Replay(module, begin, results, self._ends_forward)
                return replay.run(*inputs, enable_io_processing=False)

        return run

    def _ends_forward(self, results: Sequence[torch.Tensor]) -> None:
        for result in results:
            if isinstance(result, FunctionalTensor):  # reads writes to its memory now, not later
                torch._sync(result)  # pyright: ignore[reportPrivateUsage]
        tracer = cast(Any, get_proxy_mode()).tracer
        self._forward_names = {node.name for node in tracer.graph.nodes}

    def _trace(
        self, stand_ins: list[torch.Tensor], joint: Callable[..., Any], is_composed: bool
    ) -> fx.GraphModule:
        """Traces with composite operators as they are, or below autograd, which may then run."""
        autocast = torch.is_autocast_enabled("cpu")
        modes_off = _outer_modes_off(allows_autograd=not is_composed)
        noted = self._accumulation_noted(is_composed)
        with _disable_current_modes(), modes_off, torch.no_grad(), _fake_mode(stand_ins), noted:
            try:
                return make_fx(joint, pre_dispatch=is_composed)(*stand_ins)
            finally:
                torch.set_autocast_enabled("cpu", autocast)

    @contextlib.contextmanager
    def _accumulation_noted(self, is_composed: bool) -> Generator[None]:
        """Notes what a backward that runs again with autograd adds to gradients of parameters.

        Libraries' own checkpoints do so by `torch.autograd.backward`.
        """

        def backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
            if is_composed:  # torch does not tell modes of this call
                raise DifferentiatesInsideError
            roots = _as_tuple(tensors)
            leaves = [n.variable for n in autograd_nodes(roots) if hasattr(n, "variable")]
            given = None if grad_tensors is None else _as_tuple(grad_tensors)
            gradients: Any = torch.autograd.grad(roots, leaves, given, allow_unused=True)
            tracer = cast(Any, get_proxy_mode()).tracer
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None and get_proxy_slot(leaf, tracer, None) is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
                elif gradient is not None:
                    known = self._gradients_outside.get(id(leaf))
                    total = gradient if known is None else known[1] + gradient
                    self._gradients_outside[id(leaf)] = leaf, total

        def of_tensor(root: torch.Tensor, gradient: Any = None, *_: Any, **__: Any) -> None:
            backward(root, gradient)

        tensor: Any = torch.Tensor
        with exchanged(torch.autograd, backward=backward), exchanged(tensor, backward=of_tensor):
            yield

    def _joint(self, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        self._gradients_outside.clear()
        leaves = list(self._leaves)
        own = [v.clone() if i in self.changed else v for i, v in enumerate(inputs)]
        own = [self.tensors[i] if i in self._as_it_is else v for i, v in enumerate(own)]
        for place, value in zip(self._places, own, strict=True):
            leaves[place] = value
            if value is not self._leaves[place]:
                self._know_as(value, self._leaves[place])
        args = pytree.tree_unflatten(leaves, self._spec)
        args = own_containers(self._args, args)
        needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in self._args)
        context = _Context(needs)
        writes = [value._version for value in own]
        self.results = _run_forward(self._function, context, args)
        changed = [i for i, v in enumerate(own) if v._version != writes[i]]
        if context.dirty_tensors or any(isinstance(self.tensors[i], nn.Parameter) for i in changed):
            raise CaptureError(
                f"The step function applies {self._function.__qualname__}, a "
                f"torch.autograd.Function whose forward changes an argument in place"
                f"{at_user_line()}, which an operator of a captured step cannot do. Change and "
                f"return a copy: x = x.clone()."
            )
        if changed and not self.changed:
            raise _WritesError(changed)
        returned = _returned(self.results)
        leaves = ((leaf, leaf is r) for r in returned for leaf in pytree.tree_leaves(r))
        pairs = [(leaf, is_one) for leaf, is_one in leaves if isinstance(leaf, torch.Tensor)]
        results = [tensor for tensor, _ in pairs]
        fixed = {id(tensor) for tensor in context.non_differentiable}
        # PyTorch sees no tensors in a list or dictionary that is returned.
        self.has_gradient = [
            is_one and r.is_floating_point() and id(r) not in fixed for r, is_one in pairs
        ]
        count = len(results)
        # What an argument then holds: later uses have the gradient of the argument, as in torch.
        results += [own[i] for i in self.changed]
        self.has_gradient += [self.tensors[i].requires_grad for i in self.changed]
        if self._used is not None:
            self.has_gradient = list(self._used)
        self.wants_zeros = context.materialize_grads
        self._ends_forward(results)
        # Each is one node, which becomes an argument of the backward. The modes of mpxla, which do
        # not see it, would take it for a constant, and decide `if gradient.norm() > 1` by that.
        with DisableTorchFunction():
            given = [
                torch.empty(r.shape, dtype=r.dtype) if has_gradient else None
                for r, has_gradient in zip(results, self.has_gradient, strict=True)
            ]
        filled = iter(
            torch.zeros(r.shape, dtype=r.dtype) if g is None and self.wants_zeros else g
            for (r, is_one), g in zip(pairs, given, strict=False)
            if is_one
        )
        gradients = (next(filled) if isinstance(r, torch.Tensor) else None for r in returned)
        # A backward runs without autocast, but for what `custom_bwd` does.
        torch.set_autocast_enabled("cpu", False)
        found: tuple[Any, ...] = ()
        if any(self.has_gradient[:count]):  # PyTorch calls it for no other
            found = _as_tuple(self._function.backward(context, *gradients))
        of_inputs = self._of_inputs(found, inputs)
        for i, gradient in zip(self.changed, given[count:], strict=True):
            known = of_inputs[i]
            of_inputs[i] = gradient if known is None or gradient is None else known + gradient
        return [*results, *of_inputs, *(value for _, value in self._gradients_outside.values())]

    def _problem(self, does: str) -> CaptureError:
        return CaptureError(
            f"The step function applies {self._function.__qualname__}, a torch.autograd.Function "
            f"that {does}{at_user_line()}. If it is a checkpoint of a library's own, use "
            f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its place."
        )

    def _of_inputs(
        self, found: tuple[Any, ...], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Gradients of the tensors among the arguments, with their shapes and dtypes."""
        by_place: dict[int, torch.Tensor | None] = {}
        place = 0
        for argument, size, gradient in zip(self._args, self._sizes, found, strict=False):
            by_place[place] = gradient if isinstance(argument, torch.Tensor) else None
            place += size
        fitting: list[torch.Tensor | None] = []
        for place, tensor, value in zip(self._places, self.tensors, inputs, strict=True):
            gradient = by_place.get(place) if tensor.requires_grad else None
            if gradient is not None:
                gradient = gradient.sum_to_size(value.shape).to(value.dtype)
            fitting.append(gradient)
        return fitting

    def divided(self) -> TracedFunction:
        """Forward and backward as graphs of their own."""
        outputs = outputs_of(self.graph)
        count = len(self.has_gradient)
        results, gradients = outputs[:count], outputs[count : count + len(self.tensors)]
        added = dict(zip(self._gradients_outside, outputs[count + len(gradients) :], strict=True))
        assert added.keys() <= set(map(id, self.outside)), "the backward has used them"
        gradients += [added.get(id(tensor)) for tensor in self.outside]
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        forward = [node for node in nodes if node.name in self._forward_names]
        backward = [node for node in nodes if node.name not in self._forward_names]
        is_twice = all(any(map(is_random, part)) for part in (forward, backward))
        if is_twice and self._gradients_outside:
            raise self._problem(
                "computes again in its backward, and draws random numbers, which would be others "
                "than in its forward"
            )
        given, backward = backward[: sum(self.has_gradient)], backward[sum(self.has_gradient) :]
        wanted = [gradient for gradient in gradients if gradient is not None]
        read = [s for node in backward for s in node.all_input_nodes] + wanted
        before = {*inputs, *forward}
        saved = list(dict.fromkeys(node for node in read if node in before))
        return TracedFunction(
            name=self._function.__name__,
            forward=copy_nodes(inputs, forward, [*results, *saved]),
            backward=copy_nodes([*saved, *given], backward, wanted),
            results=tuple((tuple(_val(r).shape), _val(r).dtype) for r in results),
            has_gradient=tuple(self.has_gradient),
            is_differentiated=tuple(gradient is not None for gradient in gradients),
            is_random=any(is_random(node) for node in nodes),
        )


def own_containers(before: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with those in the place of copies that hold no tensors.

    A caller may look into a dictionary afterwards for what the function has put there.
    """
    pairs = zip(before, args, strict=True)
    return tuple(new if has_tensors(new) else old for old, new in pairs)


def _val(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _has_rows(graph: fx.Graph) -> bool:
    """Whether `torch.vmap` ran, of which torch's tracer sees only parts above autograd."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return any(getattr(t, "__module__", None) == predispatch.__name__ for t in targets)


def _returned(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple) else (results,)


def _run_forward(function: Any, context: _Context, args: tuple[Any, ...]) -> Any:
    if not has_own_setup(function):
        return function.forward(context, *args)
    results = function.forward(*args)
    function.setup_context(context, args, results)
    return results


def has_own_setup(function: Any) -> bool:
    """Whether `forward` has no `ctx`, which transforms of `torch.func` ask for."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same kinds that no graph knows."""
    # To the modes of mpxla they would be constants, with the values that are in new memory.
    with _disable_current_modes(), DisableTorchFunction(), _fake_mode(tensors):
        made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
        for stand_in, tensor in zip(made, tensors, strict=True):
            stand_in.requires_grad_(tensor.requires_grad)
    return made


def _fake_mode(tensors: Sequence[torch.Tensor]) -> FakeTensorMode:
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    return modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _outer_modes_off(allows_autograd: bool = False) -> Generator[None]:
    """Leaves of the modes that see calls of torch those of mpxla: export's write another graph."""
    stack: Any = overrides
    modes = [stack._pop_mode() for _ in range(stack._len_torch_function_stack())]
    own: Any = [mode for mode in modes if type(mode).__module__.startswith("mpxla.")]
    told = [mode for mode in own if hasattr(mode, "of_function")]  # the launcher's is not asked
    outside = [mode.of_function for mode in told]
    for mode in reversed(own):
        stack._push_mode(mode)
    for mode in told:
        mode.of_function = (True, allows_autograd)
    try:
        yield
    finally:
        for mode, before in zip(told, outside, strict=True):
            mode.of_function = before
        for _ in own:
            stack._pop_mode()
        for mode in reversed(modes):
            stack._push_mode(mode)


def _lifted(module: fx.GraphModule, forward_names: set[str]) -> list[torch.Tensor]:
    """Makes tensors that are used besides the arguments further arguments; returns them."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    found: dict[int, torch.Tensor] = {}
    placed: dict[int, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = getattr(module, str(node.target))
        if id(tensor) not in found:
            found[id(tensor)] = tensor
            with graph.inserting_after(last):
                last = placed[id(tensor)] = graph.placeholder(f"outside_{len(found)}")
            last.meta["val"] = node.meta.get("val", tensor)
            forward_names.add(last.name)
        node.replace_all_uses_with(placed[id(tensor)])
        graph.erase_node(node)
    return list(found.values())


def bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a function by their places, with defaults where PyTorch fills them in."""
    if not kwargs and not has_own_setup(function):
        return args
    found = inspect.signature(function.forward).bind(*args, **kwargs)
    found.apply_defaults()
    return found.args


def apply_captured(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_kept: bool = False,
    know_as: _KnowAs = lambda stand_in, argument: None,
) -> Any:
    """What `function.apply(*args, **kwargs)` returns, as one operator of the captured step.

    The backward of the class `function` counts; tensors among the arguments have no values. The
    operator stays in the graph if nothing reads its results, if it is to be kept. What is known of
    the value of an argument is told of what stands for it by `know_as`.

    Raises:
        CaptureError: it changes an argument in place.
    """
    args = bound(function, args, kwargs)
    traced = _Traced(function, args, know_as)
    divided = replace(traced.divided(), partial=_partial(traced, function, args, know_as))
    operator = cast(Any, operator_of(divided))
    if is_kept:
        has_side_effect(operator)
    found = iter(operator([*traced.tensors, *traced.outside]))
    results = tuple(
        pytree.tree_map_only(torch.Tensor, lambda _: next(found), r)
        for r in _returned(traced.results)
    )
    for place in traced.changed:
        traced.tensors[place].copy_(next(found))
    return results if isinstance(traced.results, tuple) else results[0]


_MOST_RESULTS = 4  # fifteen combinations


def _partial(
    traced: _Traced, function: Any, args: tuple[Any, ...], know_as: _KnowAs
) -> tuple[PartialFunction, ...] | None:
    """What the function is where some of its results turn out to have no gradient.

    Its backward can tell only after `ctx.set_materialize_grads(False)`: it gets None, and may give
    None to inputs, which then have no gradient either. Others get zeros, as all do that have too
    many results for every combination to be traced.
    """
    places = [i for i, has_gradient in enumerate(traced.has_gradient) if has_gradient]
    if traced.wants_zeros or len(places) < 2:
        return ()
    if len(places) > _MOST_RESULTS:
        return None
    known = [id(tensor) for tensor in (*traced.tensors, *traced.outside)]
    found: list[PartialFunction] = []
    for count in range(1, len(places)):
        for chosen in itertools.combinations(places, count):
            used = tuple(i in chosen for i in range(len(traced.has_gradient)))
            part = _Traced(function, args, know_as, used)
            inputs = [*range(len(part.tensors)), *(known.index(id(t)) for t in part.outside)]
            found.append(PartialFunction(used, part.divided(), tuple(inputs)))
    return tuple(found)
