"""A backward in two parts gives what the whole one gives, and does nothing twice."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.backends import backend_here
from mpxla.tests.models import conv_net
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.stage.middle import middle_stage
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


def compare_parts(kind):
    from mpxla.stage.split_backward import split_backward

    torch.manual_seed(1)
    backend = backend_here()
    device = backend.lowering.device
    module, shape = (conv_net(), (4, 3, 8, 8)) if kind == "conv" else (Block(), (2, 4, 16))
    lowered = middle_stage(module, shape)
    split = split_backward(lowered, device)
    values = [torch.rand(s.shape).to(s.dtype) + 0.5 for s in lowered.backward_inputs]
    on_device = backend.put(values)
    inputs = lowered.backward_inputs
    graph = lowered.backward.flat(inputs, device)
    whole = backend.compile("whole", graph, inputs)(on_device)
    tail = on_device[lowered.num_accumulators :]
    first = backend.compile("I", split.input_part.graph, split.input_part.inputs)(
        [tail[i] for i in split.input_part.arguments]
    )
    second = backend.compile("W", split.weight_part.graph, split.weight_part.inputs)(
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
        backend.get(whole),
        backend.get(parts),
        counts,
        (len(split.crossing), split.crossing_bytes, kept),
        [
            backend.spec(v).shape == s.shape
            for v, s in zip(first[split.num_input_grads :], split.crossing, strict=True)
        ],
    )


@pytest.mark.parametrize("kind", ["block", pytest.param("conv", marks=pytest.mark.slow)])
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
