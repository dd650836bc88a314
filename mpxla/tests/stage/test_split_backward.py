"""A backward in two parts gives what the whole one gives, and does nothing twice."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.testing import run_ranks
from mpxla.tests.models import conv_net
from mpxla.tests.tolerances import ROUNDING, assert_close_by_norm

pytestmark = pytest.mark.ranks

EXPENSIVE = ("mm", "addmm", "bmm", "convolution_backward", "native_batch_norm_backward")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def middle_stage(module, shape):
    """The stage in the middle of three, which has inputs with gradients and parameters."""
    from mpxla.config import Config
    from mpxla.graph.capture import capture_step
    from mpxla.runtime.plan import cut_step
    from mpxla.stage.lower import lower_stage

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(shape[-1], shape[-1])
            self.middle = module
            self.last = nn.Linear(5 if isinstance(module, nn.Sequential) else 16, 1)

        def forward(self, x):
            return self.last(self.middle(torch.tanh(self.first(x)))).sum()

    model = Model()
    objects = {name: name for name in dict(model.named_parameters())}

    def step(leaves):
        from mpxla.graph.capture import current_recorder

        loss = model(*leaves)
        current_recorder().backward(loss, None)
        return loss

    leaf = torch.zeros(shape)
    graph = capture_step(step, model, [leaf], objects | {n: n for n, _ in model.named_buffers()})
    pins = {"model.first": 0, "model.middle": 1, "model.last": 2}
    config = Config(pipeline_parallel_degree=3, auto_partition=False, default_partition=0)
    cut = cut_step(graph, config, pins, None)
    return lower_stage(cut.stages[1], True, torch.device("xla:0"))


def compare_parts(kind):
    from mpxla.stage.compile import compile_graph
    from mpxla.stage.device import current_device, to_device
    from mpxla.stage.split_backward import split_backward

    torch.manual_seed(1)
    device = current_device()
    module, shape = (conv_net(), (4, 3, 8, 8)) if kind == "conv" else (Block(), (2, 4, 16))
    lowered = middle_stage(module, shape)
    split = split_backward(lowered, device)
    values = [torch.rand(s.shape).to(s.dtype) + 0.5 for s in lowered.backward_inputs]
    on_device = to_device(values, device)
    whole = compile_graph("whole", lowered.backward, lowered.backward_inputs, device)(on_device)
    tail = on_device[lowered.num_accumulators :]
    first = compile_graph("I", split.input_part.graph, split.input_part.inputs, device)(
        [tail[i] for i in split.input_part.arguments]
    )
    second = compile_graph("W", split.weight_part.graph, split.weight_part.inputs, device)(
        [
            *on_device[: lowered.num_accumulators],
            *(tail[i] for i in split.weight_part.arguments),
            *first[split.num_input_grads :],
        ]
    )
    parts = [*second, *first[: split.num_input_grads]]
    counts = [
        Counter(str(n.target).split(".")[-2:][0] for n in graph.nodes if n.op == "call_function")
        for graph in (
            lowered.backward.derivative.graph,
            split.input_part.graph.graph,
            split.weight_part.graph.graph,
        )
    ]
    kept = sum(spec.num_bytes for spec in split.weight_part.inputs[lowered.num_accumulators :])
    return (
        [v.cpu() for v in whole],
        [v.cpu() for v in parts],
        counts,
        (len(split.crossing), split.crossing_bytes, kept),
        [
            tuple(v.shape) == s.shape
            for v, s in zip(first[split.num_input_grads :], split.crossing, strict=True)
        ],
    )


@pytest.mark.parametrize("kind", ["block", "conv"])
def test_parts_give_what_the_whole_gives(kind):
    ((whole, parts, counts, crossing, shapes),) = run_ranks(compare_parts, 1, kind)
    assert_close_by_norm(
        {str(i): v for i, v in enumerate(parts)},
        {str(i): v for i, v in enumerate(whole)},
        1e-5,
        floor=ROUNDING,
    )
    total, first, second = counts
    for name in EXPENSIVE:
        assert total[name] == first[name] + second[name], f"{name} runs once"
    assert sum(first[name] for name in EXPENSIVE) and sum(total.values())
    if kind == "block":
        assert first["mm"] == second["mm"] == 2
    assert all(shapes) and len(shapes) == crossing[0] > 0
    assert 0 < crossing[1] <= crossing[2], "what crosses is part of what is kept until W"
