"""What mpxla does not have raises an error that names the feature, and the script's line."""

import copy

import pytest
import torch

from mpxla.log import forget_warnings
from mpxla.tests.backends import backend_here
from mpxla.tests.clients import logged
from mpxla.tests.compat.launching import inside, refusal

pytestmark = pytest.mark.ranks


def use_smp():
    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 2})
    linear = torch.nn.Linear(2, 2)

    def import_translation():
        from smdistributed.modelparallel.torch.nn.huggingface import gpt2

        weights = {"wte.weight": torch.ones(2), "h.0.ln_1.bias": torch.ones(1)}
        assert len(gpt2.__all__) == 2
        assert all(getattr(gpt2, name)(weights) == weights for name in gpt2.__all__)
        own = {"transformer.seq_layers.0.attention.query.weight": torch.ones(1)}
        gpt2.translate_state_dict_to_hf_gpt2(own, max_seq_len=8)

    def import_hooks():
        from smdistributed.modelparallel.torch.nn.huggingface import gpt2

        gpt2.get_hf_gpt2_transformer_layer_hooks()

    def import_helper():
        from smdistributed.modelparallel.torch.state_mod import helper

        helper()

    texts = {
        "translate": refusal(import_translation),
        "hooks": refusal(import_hooks),
        "no module": refusal(
            lambda: smp.set_activation_checkpointing(linear.weight), smp.MpxlaError
        ),
        "helper": refusal(import_helper),
    }
    # Switched off, they do nothing, and a default dtype is put back.
    with (
        smp.tensor_parallelism(enabled=smp.tp_size() > 1, fused_softmax=True),
        smp.delay_param_initialization(),
        smp.model_creation(
            tensor_parallelism=False, dtype=torch.bfloat16, zero_init=True, flash_attention=1
        ),
    ):
        assert torch.nn.Linear(1, 1).weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    smp.set_tensor_parallelism(linear, False)
    assert not hasattr(smp, "no_such_name_of_smp")

    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    missing = AttributeError
    texts |= {
        "norm": refusal(lambda: optimizer._global_grad_norm, missing),
    }
    assert not hasattr(optimizer, "overflow")
    texts |= {
        "unknown of model": refusal(lambda: model.nothing_of_that_name, missing),
        "of the module": refusal(lambda: model.weight, missing),
        "unknown of optimizer": refusal(lambda: optimizer.save_optimizer_backcompt, missing),
    }
    return texts


WRITTEN_INSTEAD = {
    "translate": "Load the weights from files with the names of transformers",
    "hooks": "remove the call: smp.set_tensor_parallelism splits models of transformers as they",
    "helper": "remove the use, importing it does no harm",
}


def test_18_missing_features_are_named_with_the_line():
    texts = inside(use_smp)
    assert "which the key sharded_data_parallel_degree switches on" in texts["norm"]
    assert texts["unknown of model"] == (
        "mpxla's DistributedModel has no attribute 'nothing_of_that_name', nor has the Linear that "
        "it wraps; see dir(smp.DistributedModel) for what there is."
    )
    assert texts["of the module"].endswith(
        "the Linear that it wraps has: write model.module.weight"
    )
    assert texts["unknown of optimizer"].endswith("did you mean save_optimizer_backcompat?")
    assert "nor has the SGD that it wraps" in texts["unknown of optimizer"]
    for name, instead in WRITTEN_INSTEAD.items():
        assert instead in texts[name], texts[name]
    assert "takes a module of the model, not a Parameter" in texts["no module"]
    for name in ("translate", "hooks", "no module"):
        assert "test_missing_features.py:" in texts[name]


def recompute():
    """Losses of a step with recomputation, of one without, and what was logged."""
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.patches import checkpoint as recomputed

    smp.init({"microbatches": 2})
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    plain = copy.deepcopy(layers)
    with logged() as lines:
        model = smp.DistributedModel(Recomputing(layers, recomputed))
        for layer in layers:
            smp.set_activation_checkpointing(layer, strategy="group_2", preserve_rng_state=False)

        @smp.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        found = train(model, torch.ones(4, 2)).reduce_mean().item()
    expected = plain(plain[:2](plain(torch.ones(4, 2))) @ torch.ones(3, 2)).square().mean()
    return found, expected.item(), lines


class Recomputing(torch.nn.Module):
    def __init__(self, layers, recomputed):
        super().__init__()
        self.layers, self.recomputed = layers, recomputed

    def forward(self, x):
        x = self.recomputed.checkpoint_sequential(self.layers, x, strategy="each")
        x = self.recomputed.checkpoint_sequential(self.layers[:2], x)
        return self.recomputed.checkpoint(self.layers, x @ torch.ones(3, 2))


def test_recomputation_changes_no_results():
    found, expected, lines = inside(recompute)
    assert found == pytest.approx(expected, rel=1e-6)
    assert not [line for line in lines if "checkpoint" in line]


def move_the_model():
    import smdistributed.modelparallel.torch as smp

    smp.init()
    linear = torch.nn.Linear(2, 2)
    weight = linear.weight
    model = smp.DistributedModel(linear)
    device = backend_here().device
    other = "cpu" if device.type != "cpu" else "xla"
    forget_warnings()  # of other tests in this process
    with logged() as lines:
        assert model.to("cuda") is model and model.cuda() is model and model.to(0) is model
        assert model.to(device) is model and not lines
        assert model.to(torch.float64).to(other).module.weight.dtype is torch.float64
    return linear.weight is weight, lines


def test_moving_the_distributed_model_is_left_to_the_first_step():
    is_kept, lines = inside(move_the_model)
    assert is_kept and len(lines) == 1 and "model.to(device) is ignored" in lines[0]


def move_a_delayed_model():
    import smdistributed.modelparallel.torch as smp

    smp.init()
    torch.manual_seed(1)
    expected = torch.nn.Linear(64, 64).weight.detach().clone()
    torch.manual_seed(1)
    with smp.model_creation():
        linear = torch.nn.Linear(64, 64)
    linear.to("cuda").cuda(0).to(torch.device("cuda", 0)).to(device="cuda:0")
    assert linear.weight.device.type == "meta", "nothing is moved before it has values"
    model = smp.DistributedModel(linear)
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 64).cuda())
    assert next(model.local_parameters()).is_cuda
    torch.testing.assert_close(model.state_dict()["weight"].cpu(), expected, rtol=0, atol=0)


def test_moving_a_model_without_values_is_left_to_the_first_step():
    inside(move_a_delayed_model)
