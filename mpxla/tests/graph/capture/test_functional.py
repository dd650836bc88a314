"""The functional program is the one that torch makes by itself, in less time."""

import pytest
import torch
import torch.export.exported_program as exported_program
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from mpxla.graph.capture.functional import functionalize

pytestmark = [
    pytest.mark.unit,
    # torch 2.13 warns of what export uses itself.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]


class Mixed(nn.Module):
    """Composite operators of all kinds, regions included; three buffers that change."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(16, 8)

    def forward(self, x):
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = F.silu(self.batch_norm(x)) + self.table(torch.arange(4))
        with torch.no_grad():
            scale = F.softplus(x).mean().reshape(1).expand_as(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, self.norm.weight.expand(8, 8))
        y = F.dropout(y.float(), 0.5, self.training) * scale
        y[:, 0] = 0.0
        return F.cross_entropy(y.flatten(0, 1), torch.arange(12) % 8), torch.vstack([x[0], y[0]])


def export():
    torch.manual_seed(0)
    return torch.export.export(Mixed().train(), (torch.randn(3, 4, 8),), strict=False)


def text(program):
    return "\n".join(str(node.format_node()) for node in program.graph.nodes)


def test_program_is_that_of_all_of_torch():
    program = export()
    limited, full = functionalize(program), program.run_decompositions({})
    assert text(limited) == text(full)
    assert limited.graph_signature == full.graph_signature
    kept = {str(node.target) for node in limited.graph.nodes}
    assert {"aten.linear.default", "aten.layer_norm.default", "aten.softplus.default"} <= kept
    assert len(limited.graph_signature.buffers_to_mutate) == 3


class Plain(nn.Module):
    """Calls a function of a tensor; its weight is there for functions that need gradients."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(4, 8))

    def forward(self, x):
        return self.function(self.weight * x), self.weight.sum()


def views(x):
    first, second = x.chunk(2, dim=-1)
    twice = x.to(torch.float32) + x.to(torch.float64).to(torch.float32).contiguous()
    turned = x.transpose(1, 2).reshape(3, 32).view_as(x).type_as(x)
    return first * second.flatten(1).reshape(3, 4, 4), twice + turned, x.movedim(0, 1).reshape(-1)


def same_twice(x):
    """Alike but for what an argument is, and for an argument."""
    y, z = x.transpose(1, 2).contiguous(), x.contiguous()
    return y.reshape(3, 32), z.reshape(3, 32), y.reshape(96), y.double().reshape(96)


def drops(x):
    dropped = [F.dropout(x, 0.5), F.dropout(x, 0.5, False), F.dropout(x, 0.0)]
    return [*dropped, F.alpha_dropout(x, 0.3), F.feature_alpha_dropout(x, 0.3)]


def constants(x):
    scale = torch.tensor([0.5] * 8)
    torch.arange(4)  # goes, as nothing needs it
    return x * scale + torch.tensor(2.0), x.new_tensor([1.0]), x[torch.tensor([0, 1])]


def several_results(x):
    largest, places = x.topk(3)
    rows = torch.tensor_split(x, (1, 3), dim=1)
    return largest.sum(), places, rows[1] @ rows[1].mT, torch.unsafe_chunk(x, 2, -1)[1]


def without_statistics(x):
    return F.batch_norm(x, None, None, training=True), F.instance_norm(x), x.clone().detach_() * x


def regions(x):
    """Those of `torch.no_grad`, and those in which autocast is off: as rotary embeddings have."""
    with torch.no_grad():
        scale = x.reshape(-1).softmax(0)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            angles, more = (scale * 2).view_as(x).sin(), scale.sum()
    with torch.autocast("cpu", enabled=False):
        y = x.float() @ x.mT.contiguous()
    return y * angles.sum() + more, scale


def one_result_of_a_piece(x):
    """It has a user in the piece before the region, which goes."""
    y = x.exp()
    y.reshape(96)
    with torch.autocast("cpu", enabled=False):
        return y.float() * 2.0


PLAIN = [views, same_twice, drops, constants, several_results, without_statistics, regions]
PLAIN += [one_result_of_a_piece]


@pytest.mark.parametrize("function", PLAIN)
def test_without_writes_nothing_runs_again(function, monkeypatch):
    program = torch.export.export(Plain(function), (torch.randn(3, 4, 8),), strict=False)
    full = program.run_decompositions({})
    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    made = functionalize(program)
    assert operators(made) == operators(full)
    lines = [n.meta["stack_trace"] for n in made.graph.nodes if n.op == "call_function"]
    assert lines and all("test_functional.py" in line for line in lines)
    assert made.graph_signature.input_specs == full.graph_signature.input_specs
    values = [torch.randn(3, 4, 8)]
    results = [run(p, values) for p in (made, full)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def run(program, values):
    """What a program gives for some inputs, with the same random numbers every time."""
    torch.manual_seed(1)
    return program.module()(*values)


def operators(program):
    """What a program computes, whatever its nodes are called, with shapes.

    Torch's own is below autograd, and does not tell of `detach_`; checks are not computed.
    """
    numbers, found = {}, []
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        shapes = [getattr(v, "shape", None) for v in pytree.tree_leaves(node.meta.get("val"))]
        found.append((node.op, str(node.target), str(arguments), shapes))
        numbers[node] = len(found)
    return [line for line in found if line[0] != "placeholder"]


WITH_MORE = {
    "writes": lambda x: x.add_(1.0),
    "statistics": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    "regions": lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(torch.mm)(x[0], x[0].mT),
}


@pytest.mark.parametrize("name", WITH_MORE)
def test_programs_with_more_are_those_of_torch(name, monkeypatch):
    calls = []
    original = torch.export.ExportedProgram.run_decompositions

    def counted(self, *args):
        calls.append(self)
        return original(self, *args)

    program = torch.export.export(Plain(WITH_MORE[name]), (torch.randn(3, 4, 8),), strict=False)
    full = program.run_decompositions({})
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    made = functionalize(program)
    assert len(calls) == 1
    assert text(made) == text(full)


def test_the_callers_autocast_casts():
    def multiplied(x):
        return x @ x.mT

    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = torch.export.export(Plain(multiplied), (torch.randn(3, 4, 8),), strict=False)
        made = functionalize(program)
    (product,) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    for argument in product.args:
        assert argument.meta["val"].dtype is torch.bfloat16


def test_only_operators_of_the_program_are_prepared(monkeypatch):
    prepared = []
    override = exported_program._override_composite_implicit_decomp

    def watched(operators):
        prepared.append(len(operators))
        return override(operators)

    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", watched)
    program = export()
    functionalize(program)
    program.run_decompositions({})
    assert prepared[0] < 30 < 300 < prepared[1]


def test_torch_is_as_before_after_an_error(monkeypatch):
    program, found = export(), exported_program._collect_all_valid_cia_ops

    def fail(self, table):
        assert exported_program._collect_all_valid_cia_ops is not found
        raise ValueError("no")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fail)
    with pytest.raises(ValueError, match="no"):
        functionalize(program)
    assert exported_program._collect_all_valid_cia_ops is found


class Step(torch.autograd.Function):
    """Zero or one, with the derivative of a smooth function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + ctx.saved_tensors[0].abs())


def test_operators_with_their_own_kernels_for_autograd_keep_their_derivatives(request):
    library = torch.library.Library("mpxla_functional", "FRAGMENT")
    request.addfinalizer(library._destroy)
    for key in ("Autograd", "AutogradCPU"):
        library.define(f"step_{key}(Tensor x) -> Tensor")
        library.impl(f"step_{key}", lambda x: (x >= 0).to(x), "CPU")
        library.impl(f"step_{key}", Step.apply, key)
        torch.library.register_fake(f"mpxla_functional::step_{key}", torch.empty_like, lib=library)
    steps = torch.ops.mpxla_functional

    class Spikes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return steps.step_Autograd(self.layer(x)) + 2 * steps.step_AutogradCPU(self.layer(x))

    model, x = Spikes(), torch.randn(4, 8)
    program = functionalize(torch.export.export(model, (x,), strict=False))
    state = dict(program.state_dict)
    inputs = [state.get(s.target, x) for s in program.graph_signature.input_specs]
    *_, found = program.graph_module(*inputs)
    weight = state["layer.weight"]
    (gradient,) = torch.autograd.grad(found.square().sum(), weight)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.layer.weight)
    torch.testing.assert_close(gradient, expected)


class Counted(nn.Module):
    """A norm and a count that another module may hold as well."""

    def __init__(self, norm, count):
        super().__init__()
        self.norm = norm
        self.register_buffer("count", count, persistent=False)

    def forward(self, x):
        self.count += 1
        return self.norm(x).sin() * self.count


def test_what_two_modules_hold_is_written_once():
    def made():
        norm, count = nn.BatchNorm1d(4), torch.zeros(())
        return nn.Sequential(Counted(norm, count), Counted(norm, count))

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    plain, program = made(), torch.export.export(made(), (x,), strict=False)
    found = functionalize(program).module()
    torch.testing.assert_close(found(x), plain(x))
    names = [name for name, _ in plain.named_buffers()]
    assert names == [
        f"0.{n}" for n in ("count", *(f"norm.{b}" for b, _ in plain[0].norm.named_buffers()))
    ]
    for name in names:
        torch.testing.assert_close(found.get_buffer(name), plain.get_buffer(name))


class Rounded(nn.Module):
    """Buffers that keep less of what is copied into them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.ones(2, 3, dtype=torch.int32))

    def forward(self, x):
        with torch.no_grad():
            self.scale.copy_(x.abs().amax(0))
        self.count[:] = 9 * x
        return x / self.scale + self.count


def test_what_is_copied_into_another_dtype_is_cast():
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    plain, program = Rounded(), torch.export.export(Rounded(), (x,), strict=False)
    found = functionalize(program).module()
    assert torch.equal(found(x), plain(x))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer, rtol=0, atol=0)
