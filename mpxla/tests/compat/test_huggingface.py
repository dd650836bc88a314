"""Hugging Face's `Trainer` under the launcher: a small script, unedited, and parts of the work."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from mpxla.compat import CompatError
from mpxla.compat.__main__ import main
from mpxla.compat.huggingface.batches import cut_batch
from mpxla.compat.huggingface.refusals import patch_arguments
from mpxla.compat.huggingface.training import shifts_by_default
from mpxla.compat.patching import Patches, patched_on_import
from mpxla.compat.settings import pipeline_configuration, trainer_variables
from mpxla.tests.compat import launching
from mpxla.tests.ranks.run import run_ranks_unpooled

SCRIPTS = Path(__file__).parent / "trainer_scripts"
TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}
"""For values after some steps in float32, whose sums run in another order."""
COMPARED = ("loss", "eval_loss", "grad_norm", "learning_rate", "train_loss", "eval_accuracy")
ALWAYS = ["--report_to", "none", "--disable_tqdm", "True", "--learning_rate", "0.01"]
ALWAYS += ["--logging_steps", "1"]


def launch(script, arguments, options):
    """Runs a script as the launcher does. Returns what it has left changed."""
    from mpxla.compat.launcher import run_script

    run_script(Path(script), arguments, pipeline=options)
    import accelerate
    import transformers.trainer as module

    found = [*vars(module.Trainer).values(), *vars(accelerate.PartialState).values()]
    found += [module.is_sagemaker_mp_enabled, accelerate.utils.operations._gpu_gather]
    return [str(value) for value in found if "mpxla" in str(getattr(value, "__module__", None))]


def run_without_launcher(script, arguments):
    """Runs a script as Python does, on the host, in a process that nobody told of others."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= {"USE_TORCH_XLA": "0", "CUDA_VISIBLE_DEVICES": ""}
    scale_losses_on_the_host()
    launching.run_plainly(script, arguments)


def scale_losses_on_the_host():
    """With `fp16`, accelerate does what it does on CUDA devices; else it would do nothing."""
    from accelerate import Accelerator

    def make(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.state.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    original, Accelerator.__init__ = Accelerator.__init__, make


def run_plainly(name, arguments, folder):
    """The script without the launcher."""
    arguments = ["--output_dir", str(folder), "--use_cpu", "True", *ALWAYS, *arguments]
    script = str(SCRIPTS / f"{name}.py")
    (result,) = run_ranks_unpooled(run_without_launcher, 1, script, arguments, timeout_s=400)
    assert result.exit_code == 0, result.stderr[-3000:]


def run_launched(name, arguments, folder, num_ranks=2, env=None, **options):
    """The script under the launcher, on processes of its own.

    With further variables in `env`, it is the script that imports transformers.
    """
    arguments = ["--output_dir", str(folder), *ALWAYS, *arguments]
    results = run_ranks_unpooled(
        launch, num_ranks, str(SCRIPTS / f"{name}.py"), arguments, options, timeout_s=400, env=env
    )
    assert [result.exit_code for result in results] == [0] * num_ranks, results[0].stderr[-3000:]
    assert [result.value for result in results] == [[]] * num_ranks
    return results


def history(folder):
    """The numbers that `Trainer` has logged, in order."""
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [
        (entry["step"], key, value)
        for entry in logged
        for key, value in entry.items()
        if key in COMPARED
    ]


def assert_equal_runs(folder, other, weights="model.safetensors"):
    """Equal logs and saved models."""
    from safetensors.torch import load_file

    ours, theirs = history(folder), history(other)
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    np.testing.assert_allclose(
        [entry[2] for entry in ours], [entry[2] for entry in theirs], **TOLERANCE
    )
    saved, expected = load_file(folder / weights), load_file(other / weights)
    assert saved.keys() == expected.keys()
    torch.testing.assert_close(saved, expected, rtol=1e-3, atol=2e-4)


# --- whole scripts ------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_text_classification_on_two_stages(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    # A BERT without layers: embeddings on one stage, the classifier on the other.
    arguments = ["--do_train", "--do_predict", "--max_steps", "4", "--rows", "20", "--layers", "0"]
    arguments += ["--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"]
    arguments += ["--gradient_accumulation_steps", "2", "--label_smoothing_factor", "0.1"]
    arguments += ["--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "3"]
    run_plainly("text_classification", arguments, tmp_path / "plain")
    ranks = run_launched(
        "text_classification", arguments, tmp_path / "ours", stages="2", microbatches="2"
    )
    assert_equal_runs(tmp_path / "ours", tmp_path / "plain")
    np.testing.assert_allclose(
        np.load(tmp_path / "ours" / "predictions.npy"),
        np.load(tmp_path / "plain" / "predictions.npy"),
        **TOLERANCE,
    )
    assert_equal_optimizers(tmp_path / "ours", tmp_path / "plain")
    assert "train metrics" in ranks[0].stdout and "train metrics" not in ranks[1].stdout


def assert_equal_optimizers(folder, other):
    """Their files hold the plain optimizer's state."""
    ours, theirs = (
        torch.load(path / "checkpoint-3" / "optimizer.pt", weights_only=True)
        for path in (folder, other)
    )
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        torch.testing.assert_close(ours["state"][number], values, rtol=1e-3, atol=1e-6)


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("num_rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("is_counted", [False, True])
def test_weighted_microbatches_have_the_loss_of_the_batch(num_rows, is_counted):
    source = torch.Generator().manual_seed(num_rows)
    values = torch.randn(num_rows, 5, generator=source, dtype=torch.float64)
    labels = torch.where(torch.rand(num_rows, 5, generator=source) < 0.6, -100, 1)
    labels[:2], labels[-1, 1] = -100, 1  # rows without items that count, and one with some

    def loss(values, labels, num_items):
        counted = labels[:, 1:] != -100
        total = values[:, 1:][counted].sum()
        return total / (counted.sum() if num_items is None else num_items)

    num_items = 50.0 if is_counted else None
    batch = cut_batch(
        {"values": values, "labels": labels, "flag": True},
        4,
        num_items,
        is_shifted=True,
        is_training=True,
    )
    parts = [batch.smp_slice(4, index, 0) for index in range(4)]
    assert len({part["inputs"]["values"].shape for part in parts}) == 1
    assert all(part["inputs"]["flag"] is True for part in parts)
    losses = [
        part["weight"]
        * loss(
            part["inputs"]["values"],
            part["inputs"]["labels"],
            part["num_items"] if is_counted else None,
        )
        for part in parts
    ]
    assert all(torch.isfinite(value) for value in losses)
    torch.testing.assert_close(sum(losses), loss(values, labels, num_items), rtol=1e-6, atol=1e-7)


@pytest.mark.unit
def test_models_shift_labels_where_transformers_knows_no_loss_by_their_names():
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        XLNetConfig,
        XLNetLMHeadModel,
    )

    small = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    models = {
        GPT2LMHeadModel(
            GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, eos_token_id=0, bos_token_id=0)
        ): True,
        XLNetLMHeadModel(XLNetConfig(vocab_size=8, d_model=4, n_layer=1, n_head=1)): False,
        LlamaForCausalLM(LlamaConfig(**small, intermediate_size=4)): False,  # its name says it
    }
    for model, expected in models.items():
        assert shifts_by_default(model) is expected
        if expected:  # the first label does not count
            ids = torch.arange(6)[None]
            labels = torch.where(ids > 0, ids, -100)
            model.eval()
            assert model(ids, labels=labels).loss == model(ids, labels=ids).loss


@pytest.mark.unit
def test_rows_of_a_batch_that_is_evaluated_keep_their_order():
    rows = torch.arange(6)
    labels = torch.tensor([-100, -100, 1, 1, 1, 1])
    batch = cut_batch({"x": rows, "labels": labels}, 4, is_shifted=False, is_training=False)
    parts = [batch.smp_slice(4, index, 0)["inputs"]["x"] for index in range(batch.num_real)]
    assert batch.num_real == 3 and torch.equal(torch.cat(parts), rows)
    assert batch.weights[0] == batch.weights[3] == 0


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "num_processes", "expected"),
    [
        ({"stages": "2", "microbatches": "4"}, 2, (2, 4, False)),
        ({"stages": "2"}, 4, (2, 2, True)),
        ({"replicas": "2", "microbatches": "1"}, 4, (2, 1, True)),
        ({"microbatches": "8"}, 3, (3, 8, False)),
    ],
)
def test_options_make_the_configuration(options, num_processes, expected):
    found = pipeline_configuration(options, num_processes)
    assert (found["partitions"], found["microbatches"], found["ddp"]) == expected


@pytest.mark.unit
def test_options_stand_before_the_script(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    found = []
    monkeypatch.setattr(
        "mpxla.compat.launcher.run_script",
        lambda script, arguments, pipeline: found.append((script.name, arguments, pipeline)),
    )
    options = ["--stages=2", "--microbatches", "4"]
    assert main([*options, str(script), "--stages", "7"]) == 0
    assert main([str(script)]) == 0
    assert found == [
        ("train.py", ["--stages", "7"], {"stages": "2", "microbatches": "4"}),
        ("train.py", [], None),
    ]
    for wrong in (["--stages", "2"], ["--stages"], ["--stage", "2", str(script)]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "usage: python -m mpxla.compat [OPTIONS]" in capsys.readouterr().err


@pytest.mark.unit
def test_further_keys_come_from_text_or_a_file(tmp_path):
    (tmp_path / "keys.json").write_text('{"pipeline": "simple"}')
    for config in ('{"pipeline": "simple"}', str(tmp_path / "keys.json")):
        found = pipeline_configuration({"config": config}, 1)
        assert found["pipeline"] == "simple" and found["partitions"] == 1
    variables = trainer_variables({"partitions": 2})
    assert json.loads(variables["SM_HP_MP_PARAMETERS"]) == {"partitions": 2}
    assert variables["USE_TORCH_XLA"] == "0"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "two"}, "--stages is 'two'; give a number from 1"),
        ({"stages": "3"}, r"4 processes are not 3 stages x 1 replicas. Start 3 processes"),
        ({"stages": "2", "replicas": "3"}, "4 processes are not 2 stages x 3 replicas"),
        ({"config": "[1]"}, r"--config '\[1\]' cannot be read"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(CompatError, match=message):
        pipeline_configuration(options, 4)


class _Arguments:
    """Stands for `TrainingArguments`."""

    def __init__(self, **values):
        vars(self).update({"optim": "adamw_torch", **values})
        self.__post_init__()

    def __post_init__(self):
        self.was_completed = True

    @property
    def place_model_on_device(self):
        return None


def arguments_of(**values):
    patches = Patches()
    module = SimpleNamespace(
        TrainingArguments=_Arguments, PartialState=object, is_torch_bf16_gpu_available=bool
    )
    patch_arguments(module, patches)
    try:
        made = _Arguments(**values)
        return made, made.place_model_on_device
    finally:
        patches.close()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"torch_compile": True}, "torch_compile=True: steps are captured and compiled by XLA"),
        ({"fsdp": "full_shard"}, "fsdp='full_shard': the pipeline wraps the model already"),
        ({"deepspeed": "ds.json"}, "deepspeed='ds.json': the pipeline wraps the model already"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: a pipeline cannot go on"),
        ({"optim": "adalomo"}, "optim='adalomo': it updates parameters while gradients"),
    ],
)
def test_options_that_do_not_go_with_a_pipeline_are_refused(option, message):
    with pytest.raises(CompatError, match=message):
        arguments_of(**option)


@pytest.mark.unit
def test_options_without_effect_are_switched_off_with_a_warning(caplog):
    made, is_placed = arguments_of(use_cpu=True)
    assert made.was_completed and is_placed is False
    assert made.use_cpu is made.dataloader_pin_memory is False
    assert arguments_of()[0].place_model_on_device is None  # all of it is undone


@pytest.mark.unit
def test_modules_are_patched_when_they_are_imported_and_mended_at_the_end(tmp_path, monkeypatch):
    (tmp_path / "patched_later.py").write_text("class Thing:\n    kept = 1\n\nvalue = Thing.kept\n")
    monkeypatch.syspath_prepend(tmp_path)

    def patch(module: ModuleType, patches: Patches):
        assert patches.replace(module, "value", 2) == 1
        patches.replace(module.Thing, "kept", 3)
        patches.replace(module.Thing, "new", 4)

    with patched_on_import({"patched_later": patch}):
        import patched_later

        found = patched_later
        assert (found.value, found.Thing.kept, found.Thing.new) == (2, 3, 4)
    assert (found.value, found.Thing.kept) == (1, 1) and not hasattr(found.Thing, "new")
    with patched_on_import({"patched_later": patch}):  # it is imported already
        assert found.value == 2
    assert found.value == 1
    del sys.modules["patched_later"]


class Doubled(torch.autograd.Function):
    """Doubles, with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def differentiate_under_the_launcher():
    import mpxla as smp

    smp.init({"microbatches": 1})
    model = smp.DistributedModel(torch.nn.Linear(2, 1, bias=False))

    @smp.step
    def train(model, x):
        loss = Doubled.apply(model(x)).sum()
        model.backward(loss)
        return loss

    torch.cuda.set_device(torch.device("cuda", smp.local_rank()))  # as libraries do, too
    train(model, torch.ones(3, 2))
    return [parameter.grad.cpu().tolist() for parameter in model.parameters()]


@pytest.mark.ranks
def test_functions_of_autograd_are_captured_under_the_launcher():
    assert launching.inside(differentiate_under_the_launcher) == [[[6.0, 6.0]]]
