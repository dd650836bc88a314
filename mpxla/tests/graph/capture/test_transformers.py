"""What transformers computes with shapes that depend on values, captured with static ones."""

import pytest
import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification
from transformers.integrations.moe import ExpertsInterface

from mpxla.graph.capture.step import TensorLeaf
from mpxla.graph.capture.transformers import static_transformers
from mpxla.tests.graph.capture.test_capture import capture, run

pytestmark = pytest.mark.unit


def deberta():
    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, num_labels=3, pooler_hidden_size=8,
        pooler_dropout=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return DebertaV2ForSequenceClassification(config)


def test_deberta_leaves_out_samples_without_labels():
    model, ids = deberta(), torch.randint(20, (4, 5))
    forward = DebertaV2ForSequenceClassification.forward
    leaves = (TensorLeaf((4, 5), torch.int64), TensorLeaf((4,), torch.int64))
    captured = capture(model, lambda leaves: model(leaves[0], labels=leaves[1]).loss, *leaves)
    assert DebertaV2ForSequenceClassification.forward is forward, "undone after the capture"
    for labels in ([0, -1, 2, -100], [1, 0, 2, 2], [-1, -1, -1, -1]):
        labels = torch.tensor(labels)
        expected = model(ids, labels=labels).loss.detach()
        torch.testing.assert_close(run(captured, model, [ids, labels])[0], expected)


class Experts(torch.nn.Module):
    """As `use_experts_implementation` leaves a class of experts, with all that it can ask for."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, True, True, True
    num_experts = 5

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(5, 4, 6))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(5, 6))
        self.down_proj = torch.nn.Parameter(torch.randn(5, 3, 4))
        self.down_proj_bias = torch.nn.Parameter(torch.randn(5, 4))
        self.post_expert_norm = torch.nn.LayerNorm(4)

    def _apply_gate(self, hidden):
        gate, up = hidden.chunk(2, dim=-1)
        return torch.tanh(gate) * up


def test_experts_of_all_tokens_are_those_of_the_library():
    torch.manual_seed(0)
    experts, tokens = Experts(), torch.randn(7, 4)
    experts._is_expert_parallel = False
    chosen, weights = torch.randint(5, (7, 2)), torch.rand(7, 2)
    original = ExpertsInterface.get_interface
    with static_transformers():
        static = ExpertsInterface().get_interface("grouped_mm", None)
        result = static(experts, tokens, top_k_index=chosen, top_k_weights=weights)
    assert ExpertsInterface.get_interface is original
    library = ExpertsInterface().get_interface("batched_mm", None)
    torch.testing.assert_close(result, library(experts, tokens, chosen, weights))
