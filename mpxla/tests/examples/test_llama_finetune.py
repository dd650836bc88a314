"""The Llama: the losses of the plain script, through checkpoints, and what its log says."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from mpxla.tests.examples.running import (
    BFLOAT16_TOLERANCE,
    RELATIVE_TOLERANCE,
    load_beside,
    run_example,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

TINY = ("--width", "16", "--layers", "1", "--heads", "2", "--vocabulary", "300", "--length", "16")
TINY += ("--batch-size", "4", "--steps", "4", "--warmup-steps", "1", "--sample-tokens", "4")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{number} and {number} make {2 * number}." for number in range(60)))
    return path


def train(num_ranks, num_stages, *options):
    arguments = (*TINY, "--stages", num_stages, "--microbatches", "2", *options)
    return run_example("llama_finetune/train.py", num_ranks, *arguments)


def plain_losses(text, *options):
    (losses,) = run_example("llama_finetune/train_plain.py", 1, *TINY, "--text", text, *options)
    return losses


def approx(losses, tolerance=RELATIVE_TOLERANCE):
    return pytest.approx(losses, rel=tolerance)


@pytest.mark.slow
def test_two_stages_log_keep_checkpoints_and_go_on_from_one(text, tmp_path):
    expected, folder = plain_losses(text), tmp_path / "checkpoints"
    options = ("--text", text, "--log-dir", tmp_path / "log", "--checkpoint-dir", folder)
    options += ("--checkpoint-every", "1")
    for losses in train(2, 2, *options, "--stop-after", "2"):
        assert losses == approx(expected[:2])
    for losses in train(2, 2, *options):
        assert losses == approx(expected[2:])
    kept = {path.name for path in folder.glob("step*")}
    assert kept == {"step3_partial", "step4_partial"}
    lines = (tmp_path / "log" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss"] for record in records] == approx(expected)
    for record in records:
        assert record["tokens_per_s"] > 0
        assert 0 < record["share_of_peak"] < 1


@pytest.mark.slow
def test_divided_updates_go_on_from_a_checkpoint(text, tmp_path):
    expected = plain_losses(text)
    arguments = ("--text", text, "--checkpoint-dir", tmp_path / "run", "--checkpoint-every", "1")
    arguments += ("--shard-optimizer-state",)
    for losses in train(2, 1, *arguments, "--stop-after", "2"):
        assert losses == approx(expected[:2])
    for losses in train(2, 1, *arguments):
        assert losses == approx(expected[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "options", "tolerance"),
    [
        (2, 1, ("--tensor-parallel", "2", "--activation-checkpointing"), RELATIVE_TOLERANCE),
        (2, 1, ("--shard-parameters", "2"), RELATIVE_TOLERANCE),
        (2, 2, ("--bf16", "--activation-checkpointing"), BFLOAT16_TOLERANCE),
    ],
)
def test_options_for_large_models(text, tmp_path, num_ranks, num_stages, options, tolerance):
    wide = ("--width", "40")  # so that there are parameters worth dividing
    expected, log = plain_losses(text, *wide), tmp_path / "log"
    for losses in train(num_ranks, num_stages, "--text", text, *wide, *options, "--log-dir", log):
        assert losses == approx(expected, tolerance)
    records = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    assert len(records) == 4 and all(0 < record["share_of_peak"] < 1 for record in records)


@pytest.mark.slow
def test_a_local_model_is_trained_on(text, tmp_path):
    run_ranks(write_model, 1, text, tmp_path / "model")
    options = ("--text", text, "--model", tmp_path / "model")
    (expected,) = run_example("llama_finetune/train_plain.py", 1, *TINY, *options)
    for losses in train(2, 2, *options):
        assert losses == approx(expected)


def write_model(text, folder):
    data = load_beside("llama_finetune", "llama_data")
    model, tokenizer, _ = data.make_model_and_blocks(options_of(data, text, "--seed", "5"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def options_of(data, text, *more):
    return data.make_parser(None).parse_args([*TINY, "--text", str(text), *more])


def look_at_data(text):
    """What the packing gives, and batches of two epochs."""
    data = load_beside("llama_finetune", "llama_data")
    tokenizer = data.train_tokenizer([text.read_text()], 300)
    blocks = data.pack(["one two", "three"], tokenizer, 2)
    batches = [data.batch_of_step(torch.arange(7), step, 3, seed=0).tolist() for step in range(4)]
    errors = []
    for call in (
        lambda: data.pack(["a"], tokenizer, 99),
        lambda: data.batch_of_step(blocks, 0, 99, 0),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        errors.append(str(refused.value))
    return tokenizer.decode(blocks.flatten()), batches, errors, tokenizer.get_vocab()


def test_text_is_packed_and_epochs_have_their_own_order(text):
    first, second = run_ranks(look_at_data, 2, text)
    assert first == second
    decoded, batches, errors, _ = first
    assert decoded.startswith("one two<end>t")
    for epoch in (batches[:2], batches[2:]):
        assert len({number for batch in epoch for number in batch}) == 6
    assert batches[:2] != batches[2:]
    assert errors[0].endswith("fewer than one block of 99")
    assert errors[1].endswith("blocks of text do not fill a batch of 99")


def operations(sizes, num_parameters, num_tokens, length):
    log = load_beside("llama_finetune", "run_log")
    return log.step_operations(SimpleNamespace(**sizes), num_parameters, num_tokens, length)


def test_operations_of_a_step():
    sizes = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2}
    call = ({**sizes, "tie_word_embeddings": False}, 1000, 50, 8)
    assert run_ranks(operations, 1, *call) == [50 * (6 * 960 + 12 * 2 * 4 * 8)]
    call = ({**sizes, "tie_word_embeddings": True}, 1000, 50, 8)
    assert run_ranks(operations, 1, *call) == [50 * (6 * 1000 + 12 * 2 * 4 * 8)]


def test_the_log_goes_to_tensorboard_where_that_is_installed(tmp_path, monkeypatch):
    scalars = []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, *scalar):
            scalars.append(scalar)

        def close(self):
            scalars.append("closed")

    stand_in = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboard" or None)
    log = load_beside("llama_finetune", "run_log").RunLog(tmp_path, is_silent=False)
    log.write(3, loss=0.5, tokens_per_s=10.0)
    log.close()
    assert scalars == [("loss", 0.5, 3), ("tokens_per_s", 10.0, 3), "closed"]
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 3
