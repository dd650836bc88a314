"""Scripts in the manner of transformers' examples, under the launcher and plainly. All are slow."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mpxla.tests.compat.test_huggingface import (
    SCRIPTS,
    assert_equal_runs,
    history,
    run_launched,
    run_plainly,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1200)]

BATCHES = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "4"]
STEPS = ["--max_steps", "4"]
NO_CHECKPOINTS = ["--save_strategy", "no"]
TWO_STAGES = {"stages": "2", "microbatches": "2"}
SMALLEST = ["--layers", "0"]
"""A BERT's embeddings and its classifier, for what is about the trainer alone."""


def compare(name, arguments, tmp_path, **settings):
    """Runs a script on two stages and plainly. Returns both folders."""
    folder, other = tmp_path / "ours", tmp_path / "plain"
    run_plainly(name, arguments, other)
    run_launched(name, arguments, folder, **TWO_STAGES)
    assert_equal_runs(folder, other, **settings)
    return folder, other


def make_pretrained(folder):
    """A classifier without training, with a tokenizer and texts beside it."""
    words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3} | {f"w{i}": i for i in range(4, 40)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for name, count in (("train", 24), ("validation", 6)):
        rows = [
            f"{' '.join(f'w{(7 * i + k) % 36 + 4}' for k in range(i % 9))} {label},{label}"
            for i, label in enumerate(["good", "bad"] * (count // 2))
        ]
        (folder / f"{name}.csv").write_text("\n".join(["sentence,label", *rows, ""]))


def test_a_script_from_files_goes_on_from_its_last_checkpoint(tmp_path):
    pytest.importorskip("datasets", reason="the script reads its files with datasets")
    make_pretrained(tmp_path)
    arguments = ["--do_train", "--do_eval", "--do_predict", "--model_name_or_path", str(tmp_path)]
    arguments += ["--train_file", f"{tmp_path}/train.csv", "--save_steps", "2", *BATCHES]
    arguments += ["--validation_file", f"{tmp_path}/validation.csv"]
    for steps in ("2", "4"):
        folders = compare("classification_from_files", [*arguments, "--max_steps", steps], tmp_path)
    results = [json.loads((folder / "all_results.json").read_text()) for folder in folders]
    assert results[0].keys() == results[1].keys() and results[0]["eval_samples"] == 6
    for name in ("predict_results.txt", "tokenizer.json"):
        ours, plain = ((folder / name).read_text() for folder in folders)
        assert ours == plain
    assert "generated_from_trainer" in (folders[0] / "README.md").read_text()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folders[0])
    assert plain.config.id2label == {0: "bad", 1: "good"}


FURTHER = ["--gradient_checkpointing", "True", "--eval_on_start", "True", "--eval_steps", "2"]
FURTHER += ["--eval_strategy", "steps", "--eval_accumulation_steps", "1", "--max_grad_norm", "0"]
FURTHER += ["--dataloader_num_workers", "1", "--torch_empty_cache_steps", "1"]
FURTHER += ["--train_sampling_strategy", "group_by_length", "--logging_first_step", "True"]
FURTHER += ["--include_num_input_tokens_seen", "True", "--save_total_limit", "1"]
FURTHER += ["--save_steps", "2", "--warmup_steps", "2", "--lr_scheduler_type", "polynomial"]


def test_further_options(tmp_path):
    arguments = ["--do_train", "--do_eval", *BATCHES, *STEPS, *FURTHER]
    folders = compare("text_classification", arguments, tmp_path)
    seen = [
        [entry["num_input_tokens_seen"] for entry in log if "num_input_tokens_seen" in entry]
        for log in (
            json.loads((folder / "trainer_state.json").read_text())["log_history"]
            for folder in folders
        )
    ]
    assert seen[0] == seen[1] and seen[0][-1] == 4 * 8 * 6
    assert [path.name for path in folders[0].glob("checkpoint-*")] == ["checkpoint-4"]


SMOOTHED = ["--label_smoothing_factor", "0.1"]
ACCUMULATED = ["--gradient_accumulation_steps", "3", "--max_grad_norm", "0.1"]
ACCUMULATED += ["--lr_scheduler_type", "cosine", "--warmup_steps", "1"]


def test_language_modelling_with_sgd_and_accumulation(tmp_path):
    arguments = [*BATCHES, *STEPS, *NO_CHECKPOINTS, "--optim", "sgd", *ACCUMULATED, *SMOOTHED]
    compare("language_modelling", arguments, tmp_path)


def test_translation_with_adafactor_and_generation(tmp_path):
    """Adafactor divides by a gradient's size: GPT-2's key biases, whose gradient is 0 but for
    rounding, would get noise; T5 has no biases.
    """
    arguments = [*BATCHES, *STEPS, *NO_CHECKPOINTS, "--optim", "adafactor", *ACCUMULATED]
    arguments += ["--predict_with_generate", "True"]
    folder, other = compare("translation", arguments, tmp_path)
    generated, expected = (np.load(path / "predictions.npy") for path in (folder, other))
    assert np.array_equal(generated, expected)


ADAPTERS = [*BATCHES, *STEPS, "--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2"]


def test_adapters_of_peft(tmp_path):
    pytest.importorskip("peft", reason="PEFT is not installed")
    arguments = [*ADAPTERS, *SMOOTHED, "--load_best_model_at_end", "True"]
    folder, other = compare("adapters", arguments, tmp_path, weights="adapter_model.safetensors")
    results = [json.loads((path / "eval_results.json").read_text()) for path in (folder, other)]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-5)
    arguments += ["--resume_from_checkpoint", str(folder / "checkpoint-2")]
    run_launched("adapters", arguments, tmp_path / "resumed", **TWO_STAGES)
    assert history(tmp_path / "resumed")[:-1] == history(folder)[:-1]  # bitwise


def test_trl_takes_its_metrics(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    arguments = [*BATCHES, *STEPS, *NO_CHECKPOINTS, "--bf16", "False", "--pad_to_multiple_of", "8"]
    folder, other = compare("supervised", arguments, tmp_path)
    logs = [
        json.loads((path / "trainer_state.json").read_text())["log_history"]
        for path in (folder, other)
    ]
    for ours, theirs in zip(*logs, strict=True):
        for key in ("entropy", "mean_token_accuracy", "num_tokens"):
            assert (key in ours) == (key in theirs)
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4, abs=1e-6)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= logs[0][0].keys()


REPLICAS = ["--do_train", "--do_eval", "--rows", "40", "--num_train_epochs", "2"]
REPLICAS += ["--gradient_accumulation_steps", "2", "--label_smoothing_factor", "0.1"]
REPLICAS += ["--eval_strategy", "epoch", "--per_device_eval_batch_size", "2", *NO_CHECKPOINTS]
REPLICAS += SMALLEST


def test_replicas_are_one_trainer_on_the_union_of_their_batches(tmp_path):
    """The last update of an epoch has fewer batches than the others."""
    plain = ["--per_device_train_batch_size", "8"]
    run_plainly("text_classification", [*REPLICAS, *plain], tmp_path / "plain")
    ours = [*REPLICAS, "--per_device_train_batch_size", "4"]
    run_launched("text_classification", ours, tmp_path / "ours", 4, **TWO_STAGES)
    assert_equal_runs(tmp_path / "ours", tmp_path / "plain")


DROPOUT = ["--do_train", "--rows", "19", "--dropout", "0.1", "--max_steps", "8"]
DROPOUT += ["--per_device_train_batch_size", "4", "--eval_strategy", "steps", "--eval_steps", "3"]
DROPOUT += ["--save_steps", "3", "--load_best_model_at_end", "True", "--patience", "2", *SMALLEST]


def test_resuming_is_bitwise_and_plain_transformers_reads_the_checkpoints(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_launched("text_classification", DROPOUT, whole, **TWO_STAGES)
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    arguments = [*DROPOUT, "--resume_from_checkpoint", str(resumed / "checkpoint-3")]
    run_launched("text_classification", arguments, resumed, **TWO_STAGES)
    assert history(resumed)[:-1] == history(whole)[:-1]  # the last is the mean of another number
    weights = [load_file(folder / "model.safetensors") for folder in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    best = json.loads((whole / "trainer_state.json").read_text())["best_model_checkpoint"]
    for name, value in load_file(f"{best}/model.safetensors").items():
        assert torch.equal(value, weights[0][name])
    arguments = [*DROPOUT, "--resume_from_checkpoint", str(whole / "checkpoint-3")]
    run_plainly("text_classification", arguments, tmp_path / "plain")
    assert len(history(tmp_path / "plain")) == len(history(whole))


def test_tensorboard_and_a_batch_that_does_not_divide(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    arguments = ["--do_train", "--rows", "19", "--num_train_epochs", "1", *NO_CHECKPOINTS]
    arguments += ["--per_device_train_batch_size", "8", "--report_to", "tensorboard"]
    folder, _ = compare("text_classification", arguments, tmp_path)
    assert list(folder.glob("runs/*/events*"))


HALF = ["--do_train", "--do_predict", "--rows", "24", "--label_smoothing_factor", "0.1"]


def logged(folder):
    """Numbers of the log, and what is finite among them (norms of gradients may overflow)."""
    values = np.array([entry[2] for entry in history(folder)])
    return np.where(np.isfinite(values), values, 0), np.isfinite(values)


def test_bf16_is_autocast_of_the_model(tmp_path):
    """As in a plain `Trainer`, whose autocast for the host rounds at other places."""
    arguments = [*HALF, *STEPS, *NO_CHECKPOINTS, "--per_device_train_batch_size", "8"]
    run_plainly("text_classification", arguments, tmp_path / "full")
    arguments += ["--bf16", "True"]
    run_plainly("text_classification", arguments, tmp_path / "plain")
    own = {"PYTHONHASHSEED": "0"}
    run_launched("text_classification", arguments, tmp_path / "ours", env=own, **TWO_STAGES)
    ours, full = (logged(tmp_path / name)[0] for name in ("ours", "full"))
    assert_equal_in_half_precision(tmp_path, 0.02)
    assert max(abs(ours - full)) > 1e-4, "it has rounded"


def assert_equal_in_half_precision(folder, tolerance):
    """Equal logs and predictions, models in float32."""
    ours, plain = (logged(folder / name) for name in ("ours", "plain"))
    assert np.array_equal(ours[1], plain[1])
    np.testing.assert_allclose(ours[0], plain[0], rtol=tolerance, atol=tolerance / 4)
    weights = [load_file(folder / name / "model.safetensors") for name in ("ours", "plain")]
    for name, value in weights[1].items():
        assert weights[0][name].dtype is value.dtype is torch.float32
    predictions = [np.load(folder / name / "predictions.npy") for name in ("ours", "plain")]
    assert predictions[0].dtype == np.float32
    np.testing.assert_allclose(*predictions, rtol=2.5 * tolerance, atol=tolerance)


FP16 = [*HALF, *SMALLEST, "--fp16", "True", "--loss_scale", str(2**23), "--max_steps", "8"]


def test_fp16_scales_losses_skips_updates_and_resumes(tmp_path):
    """As accelerate does it on CUDA devices; learning rates go on where updates are skipped, since
    fused AdamW skips them by itself.
    """
    arguments = [*FP16, "--per_device_train_batch_size", "8", "--save_steps", "5"]
    run_plainly("text_classification", arguments, tmp_path / "plain")
    run_launched("text_classification", arguments, tmp_path / "ours", **TWO_STAGES)
    assert_equal_in_half_precision(tmp_path, 0.002)
    assert np.sum(~logged(tmp_path / "ours")[1]) > 2, "some updates were skipped"
    ours, plain = (
        torch.load(tmp_path / name / "checkpoint-8" / "scaler.pt") for name in ("ours", "plain")
    )
    assert ours == plain and ours["scale"] < 2**20
    arguments += ["--resume_from_checkpoint", str(tmp_path / "ours" / "checkpoint-5")]
    run_launched("text_classification", arguments, tmp_path / "resumed", **TWO_STAGES)
    assert str(history(tmp_path / "resumed")[:-1]) == str(history(tmp_path / "ours")[:-1])


def test_fp16_over_replicas_with_accumulation(tmp_path):
    """Optimizers that are not fused keep their learning rate where an update is skipped."""
    arguments = [*FP16, *NO_CHECKPOINTS, "--optim", "adamw_torch"]
    arguments += ["--gradient_accumulation_steps", "2"]
    plain = ["--per_device_train_batch_size", "8"]
    run_plainly("text_classification", [*arguments, *plain], tmp_path / "plain")
    ours = ["--per_device_train_batch_size", "4"]
    options = {"stages": "1", "microbatches": "2"}
    run_launched("text_classification", [*arguments, *ours], tmp_path / "ours", **options)
    assert_equal_in_half_precision(tmp_path, 0.002)


@pytest.mark.parametrize("half", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_full_eval_casts_the_model(half, tmp_path):
    arguments = [*HALF, *SMALLEST, *NO_CHECKPOINTS, "--max_steps", "1"]
    arguments += ["--per_device_train_batch_size", "8", f"--{half}_full_eval", "True"]
    folder, other = compare("text_classification", arguments, tmp_path)
    found, expected = (np.load(path / "predictions.npy") for path in (folder, other))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype(float), expected, rtol=0.02, atol=0.002)
    rounded = torch.from_numpy(found).to(torch.bfloat16 if half == "bf16" else torch.float16)
    assert np.array_equal(rounded.double().numpy(), found.astype(float))


EXAMPLE = SCRIPTS.parents[3] / "examples" / "hf_trainer" / "train"


def test_the_example_has_the_losses_of_plain_transformers(tmp_path):
    shared = ["--max_steps", "6", "--eval_strategy", "steps", "--eval_steps", "3"]
    shared += ["--save_strategy", "steps", "--save_steps", "6", "--warmup_steps", "2"]
    shared += ["--per_device_train_batch_size", "32"]
    run_plainly(EXAMPLE, shared, tmp_path / "plain")
    run_launched(EXAMPLE, shared, tmp_path / "ours", stages="2", microbatches="4")
    folders = [tmp_path / name / "checkpoint-6" for name in ("ours", "plain")]
    assert_equal_runs(*folders)
    results = [
        json.loads((folder.parent / "eval_results.json").read_text())["eval_accuracy"]
        for folder in folders
    ]
    assert results[0] == results[1] > 0.1, "it has learned something"
