"""What mpxla does not have raises an error that names the feature, and the script's line."""

import copy
import json
import logging
import os

import pytest
import torch

from mpxla.errors import ConfigError
from mpxla.log import get_logger
from mpxla.tests.compat.launching import refusal
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def use_smp():
    from mpxla.compat.launcher import mapped

    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"microbatches": 2})
    with mapped():
        return _use_smp()


def _use_smp():
    import smdistributed.modelparallel.torch as smp

    smp.init()
    linear = torch.nn.Linear(2, 2)

    def enter(context):
        with context:
            pass

    def import_translation():
        from smdistributed.modelparallel.torch.nn.huggingface import gpt2

        gpt2.translate_state_dict_to_hf_gpt2({})

    def import_full_state():
        from smdistributed.modelparallel.torch import sharded_data_parallel_checkpoint as merging

        merging.get_full_state_dict_from_sharded_data_parallel_checkpoint("folder")

    texts = {
        "translate": refusal(import_translation),
        "sharded": refusal(lambda: enter(smp.model_creation(zero_init=True))),
        "full_state": refusal(import_full_state),
        "no module": refusal(
            lambda: smp.set_activation_checkpointing(linear.weight), smp.MpxlaError
        ),
        "fused": refusal(lambda: smp.optimizers.FusedLAMB([])),
    }
    # Switched off, they do nothing, and a default dtype is put back.
    with (
        smp.tensor_parallelism(enabled=smp.tp_size() > 1, fused_softmax=True),
        smp.delay_param_initialization(),
        smp.model_creation(tensor_parallelism=False, dtype=torch.bfloat16, flash_attention=1),
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


FEATURES = {
    "translation of state dicts to those of SMP's own layers": ("translate",),
    "sharded data parallelism": ("sharded", "norm", "full_state"),
}


def test_18_missing_features_are_named_with_the_line():
    (texts,) = run_ranks(use_smp, 1)
    for feature, names in FEATURES.items():
        for name in names:
            assert f"{feature}, which mpxla does not have yet" in texts[name], texts[name]
    assert texts["unknown of model"] == (
        "mpxla's DistributedModel has no attribute 'nothing_of_that_name', nor has the Linear that "
        "it wraps; see dir(smp.DistributedModel) for what there is."
    )
    assert texts["of the module"].endswith(
        "the Linear that it wraps has: write model.module.weight"
    )
    assert texts["unknown of optimizer"].endswith("did you mean save_optimizer_backcompat?")
    assert "nor has the SGD that it wraps" in texts["unknown of optimizer"]
    assert "a fused CUDA kernel of apex" in texts["fused"]
    assert "takes a module of the model, not a Parameter" in texts["no module"]
    for name in ("translate", "sharded", "no module"):
        assert "test_missing_features.py:" in texts[name]


def recompute():
    """Losses of a step with recomputation, of one without, and what was logged."""
    from mpxla.compat.launcher import mapped

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    with mapped():
        import smdistributed.modelparallel.torch as smp
        from smdistributed.modelparallel.torch.patches import checkpoint as recomputed

        smp.init({"microbatches": 2})
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        plain = copy.deepcopy(layers)
        model = smp.DistributedModel(Recomputing(layers, recomputed))
        for layer in layers:
            smp.set_activation_checkpointing(layer, strategy="group_2", preserve_rng_state=False)

        @smp.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        found = train(model, torch.ones(4, 2)).reduce_mean().item()
    get_logger().removeHandler(handler)
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
    ((found, expected, lines),) = run_ranks(recompute, 1)
    assert found == pytest.approx(expected, rel=1e-6)
    assert not [line for line in lines if "checkpoint" in line]


@pytest.mark.parametrize(
    ("key", "value", "feature"),
    [
        ("sharded_data_parallel_degree", 2, "sharded data parallelism"),
    ],
)
def test_18_configuration_of_missing_features(key, value, feature):
    (text,) = run_ranks(initialize, 1, {key: value, "ddp": True})
    assert f"{key}: {value} asks for {feature}, which mpxla does not have yet" in text


def initialize(config):
    from mpxla.compat.launcher import mapped

    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(config)
    with mapped():
        import smdistributed.modelparallel.torch as smp

        return refusal(smp.init, ConfigError)


def move_the_model():
    from mpxla.compat.launcher import mapped

    with mapped():
        import smdistributed.modelparallel.torch as smp

        smp.init()
        linear = torch.nn.Linear(2, 2)
        weight = linear.weight
        model = smp.DistributedModel(linear)
        assert model.to("cuda") is model and model.cuda() is model and model.to(0) is model
        assert model.to(torch.float64).module.weight.dtype is torch.float64
        return linear.weight is weight


def test_moving_the_distributed_model_is_left_to_the_first_step():
    assert run_ranks(move_the_model, 1) == [True]


def move_a_delayed_model():
    from mpxla.compat.launcher import mapped

    with mapped():
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
    run_ranks(move_a_delayed_model, 1)
