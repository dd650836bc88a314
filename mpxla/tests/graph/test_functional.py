"""The functional program is the one that torch makes by itself, in less time."""

import pytest
import torch
import torch.export.exported_program as exported_program
import torch.nn.functional as F
from torch import nn

from mpxla.graph.functional import functionalize

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
