"""Trainers that derive from transformers' `Trainer`: losses, batches and files of their own."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from torch.nn import functional as F

from mpxla.compat import CompatError
from mpxla.compat.huggingface.batches import cut_batch
from mpxla.compat.huggingface.checks import check_loss, joined, note_outputs
from mpxla.compat.huggingface.metrics import (
    OutsideOfSteps,
    Recording,
    computed,
    in_place_of,
    shadow_of,
)
from mpxla.compat.huggingface.texts import with_tokens
from mpxla.parallel.model import DistributedModel
from mpxla.tests.compat.test_huggingface import (
    assert_equal_runs,
    history,
    run_launched,
    run_plainly,
)

# --- parts --------------------------------------------------------------------------------------


def cut_pairs(num_pairs, num_parts, **inputs):
    ids = torch.arange(2 * num_pairs)
    inputs |= {"ids": ids, "margin": ids[:num_pairs] / 10}
    return cut_batch(inputs, num_parts, is_shifted=False, is_training=True, rows_per_example=2)


@pytest.mark.unit
@pytest.mark.parametrize("num_pairs", [1, 4, 6])
def test_a_microbatch_has_both_rows_of_its_pairs(num_pairs):
    batch = cut_pairs(num_pairs, 4)
    parts = [batch.smp_slice(4, index, 0)["inputs"] for index in range(4)]
    for part in parts:
        first, second = part["ids"].chunk(2)
        assert torch.equal(second, first + num_pairs) and torch.equal(part["margin"], first / 10)
    real = parts[: batch.num_real]
    assert torch.equal(joined([part["ids"] for part in real], batch), batch.inputs["ids"])
    assert torch.equal(joined([part["margin"] for part in real], batch), batch.inputs["margin"])


@pytest.mark.unit
def test_labels_of_pairs_count_by_pairs():
    batch = cut_pairs(4, 2, labels=torch.tensor([1, 1, 1, -100]))
    assert batch.weights.tolist() == pytest.approx([2 / 3, 1 / 3])


class Model(torch.nn.Module):
    def forward(self, ids):
        return torch.zeros(len(ids), 3)


class TrainerOfPairs:
    """What `check_loss` needs of a trainer."""

    def __init__(self, loss):
        self.model, self.loss, self.accelerator, self.seen = Model(), loss, None, []

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        self.seen.append(inputs)
        return self.loss(model(inputs["ids"]), inputs)


def of_pairs(found, inputs):
    first, second = found[:, 0].chunk(2)
    return -F.logsigmoid(first - second - inputs["margin"]).mean()


def contrastive(found, inputs):
    first, second = found.chunk(2)
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


def by_classes(found, inputs):
    labels = (inputs["ids"] > 2).long()
    return F.cross_entropy(found, labels, torch.tensor([1.0, 5.0, 2.0]).to(found.dtype))


def check(loss, num_parts=2):
    trainer, batch = TrainerOfPairs(loss), cut_pairs(4, num_parts)
    note_outputs(trainer, [torch.zeros(8 // num_parts, 3)])
    problem = check_loss(trainer, batch, None)
    assert not trainer.seen, "the trainer keeps nothing of the trial"
    return problem


@pytest.mark.unit
def test_a_loss_that_compares_or_weights_the_rows_of_a_batch_is_noticed():
    assert check(of_pairs) is None and check(contrastive, num_parts=1) is None
    for loss in (contrastive, by_classes):
        assert "TrainerOfPairs is not the mean of the losses of its microbatches" in check(loss)


@pytest.mark.unit
def test_a_loss_may_write_into_the_outputs_of_the_model():
    """As MatryoshkaLoss does, which shortens embeddings there."""

    class Shortens(TrainerOfPairs):
        def compute_loss(self, model, inputs, num_items_in_batch=None):
            outputs = model(inputs["ids"])
            total = 0.0
            for width in (3, 2):
                assert outputs["embedding"].shape[1] >= width
                outputs["embedding"] = outputs["embedding"][:, :width]
                total = total + self.loss(outputs["embedding"], inputs)
            return total

    def check_shortened(loss):
        trainer, batch = Shortens(loss), cut_pairs(4, 2)
        note_outputs(trainer, [{"embedding": torch.zeros(4, 3)}])
        return check_loss(trainer, batch, None)

    assert check_shortened(of_pairs) is None
    assert "Shortens is not the mean of the losses" in check_shortened(contrastive)


@pytest.mark.unit
def test_a_loss_that_cannot_be_tried_has_whole_batches():
    def in_float32(found, inputs):
        return F.binary_cross_entropy(found[:, 0], (inputs["ids"] > 2).float())

    def of_known_values(found, inputs):
        raise ValueError("no model gives such values")

    assert check(in_float32) is None, "it can, in the dtype of the model"
    text = check(of_known_values)
    assert "TrainerOfPairs could not be tried" in text and "no model gives such values" in text


@pytest.mark.unit
def test_a_batch_that_is_cut_between_its_pairs_is_noticed():
    trainer = TrainerOfPairs(of_pairs)
    inputs = {"ids": torch.arange(8), "margin": torch.zeros(())}
    batch = cut_batch(inputs, 2, is_shifted=False, is_training=True)
    note_outputs(trainer, [torch.zeros(4, 3)])
    assert "TrainerOfPairs is not the mean" in check_loss(trainer, batch, None)


@pytest.mark.unit
def test_a_whole_batch_is_one_microbatch():
    inputs = {"ids": torch.arange(8)}
    batch = cut_batch(inputs, 4, is_shifted=False, is_training=True, is_whole=True)
    assert batch.weights.tolist() == [1, 0, 0, 0]
    assert all(
        torch.equal(batch.smp_slice(4, i, 0)["inputs"]["ids"], inputs["ids"]) for i in (0, 3)
    )


@pytest.mark.unit
def test_columns_that_a_loss_puts_into_one_call_of_the_model_are_no_comparison():
    """As losses of sentence-transformers do with the columns behind the first."""

    class OfColumns(TrainerOfPairs):
        def compute_loss(self, model, inputs, num_items_in_batch=None):
            first, second = model(torch.cat([inputs["a"], inputs["b"]])).chunk(2)
            return (first - second).square().mean()

    columns = {"a": torch.arange(4), "b": torch.arange(4)}
    trainer = OfColumns(None)
    note_outputs(trainer, [torch.zeros(4, 3)])
    check_loss(trainer, cut_batch(columns, 2, is_shifted=False, is_training=True), None)


class Alone:
    def gather(self, value):
        return value


def with_gathered(take):
    def compute(self, model, inputs, num_items_in_batch=None):
        taken = take(self.accelerator.gather(torch.ones(2)))
        return of_pairs(model(inputs["ids"]), inputs) * taken

    return type("TrainerThatGathers", (TrainerOfPairs,), {"compute_loss": compute})


@pytest.mark.unit
def test_a_loss_that_depends_on_other_processes_is_refused():
    trainer = with_gathered(lambda gathered: 1 + gathered.sum().item())(None)
    trainer.accelerator = Alone()
    note_outputs(trainer, [torch.zeros(8, 3)])
    with pytest.raises(CompatError, match=r"depends on what accelerator\.gather"):
        check_loss(trainer, cut_pairs(4, 1), None)
    trainer = with_gathered(lambda gathered: gathered.sum())(None)
    recording = Recording(trainer.model, SimpleNamespace(bf16=False, fp16=False))
    with pytest.raises(CompatError, match=r"TrainerThatGathers depends on what"):
        computed(trainer, recording, cut_pairs(4, 1).inputs)


@pytest.mark.unit
def test_losses_that_hold_the_model_call_the_stand_in():
    model = Model()
    args = SimpleNamespace(bf16=False, fp16=False)
    loss = torch.nn.Sequential(torch.nn.Identity(), model)
    wrapped = DistributedModel.__new__(DistributedModel)
    torch.nn.Module.__init__(wrapped)
    torch.nn.Module.__setattr__(wrapped, "module", model)
    trainer = SimpleNamespace(model=model, loss={"a": loss}, model_wrapped=wrapped)
    recording = Recording(model, args)
    with in_place_of(model, recording, trainer):
        loss[1](torch.zeros(2))
        loss[1].forward = lambda ids: "decorated"  # as MatryoshkaLoss does
        assert loss[1](torch.zeros(2)) == "decorated"
        assert wrapped.module is model
    assert loss[1] is model and len(recording.outputs) == 1


@pytest.mark.unit
def test_stand_ins_have_what_the_wrapped_model_has():
    """A plain trainer has the model itself, and asks it for more than a wrapper has."""
    model = Model()
    model.width = lambda: 3
    wrapped = DistributedModel.__new__(DistributedModel)
    torch.nn.Module.__init__(wrapped)
    torch.nn.Module.__setattr__(wrapped, "module", model)
    recording = Recording(wrapped, SimpleNamespace(bf16=False, fp16=False))
    assert recording.width() == 3 and recording.training
    assert not hasattr(recording, "height")


@pytest.mark.unit
def test_shadows_and_the_end_of_an_evaluation_have_the_own_compute_loss():
    trainer = TrainerOfPairs(of_pairs)
    own = trainer.compute_loss
    outside = OutsideOfSteps(lambda trainer, model, inputs: "by a step", trainer)
    assert trainer.compute_loss(None, {}) == "by a step" and outside.own == own
    shadow, _ = shadow_of(trainer)
    assert shadow.compute_loss.__func__ is own.__func__ and shadow.compute_loss.__self__ is shadow
    outside.remove(trainer)
    assert trainer.compute_loss == own and "compute_loss" not in vars(trainer)


class Reranker(torch.nn.Module):
    """A model that makes tokens of texts by itself."""

    num_labels = 1

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def preprocess(self, pairs):
        return {"ids": torch.tensor([[len(text) for text in pair] for pair in pairs])}

    def forward(self, tokens):
        return {"scores": tokens["ids"].sum(1) * self.weight}


class TrainerOfTexts(TrainerOfPairs):
    """As `CrossEncoderTrainer`: batches of texts, of which the loss makes pairs."""

    def __init__(self):
        super().__init__(None)
        self.model = Reranker()

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        labels, first, second = inputs.pop("label"), inputs["a"], inputs["b"]
        pairs = list(zip(first, second, strict=True))
        if isinstance(second[0], list):
            pairs = [(one, other) for one, each in pairs for other in each]
        size = len(first)  # of each call
        scores = [
            model(model.preprocess(pairs[i : i + size]))["scores"]
            for i in range(0, len(pairs), size)
        ]
        return (torch.cat(scores) - labels.repeat(len(scores))).square().mean()


def loss_of_steps(trainer, inputs):
    """The loss that the step functions add up, and the parts that count."""
    taken, is_whole = with_tokens(trainer, inputs)
    assert not any(isinstance(leaf, str) and leaf for leaf in pytree.tree_leaves(taken))
    batch = cut_batch(taken, 2, is_shifted=False, is_training=True, is_whole=is_whole)
    total = 0.0
    for i in range(2):
        part = batch.smp_slice(2, i, 0)
        recording = Recording(trainer.model, SimpleNamespace(bf16=False, fp16=False))
        total += part["weight"].item() * computed(trainer, recording, part["inputs"])[0].item()
        note_outputs(trainer, recording.outputs)
    assert check_loss(trainer, batch, None) is None
    return total, batch.num_real


@pytest.mark.unit
def test_texts_of_a_batch_are_tokens_before_its_step():
    texts = ["a", "bb", "ccc", "dddd"]
    trainer = TrainerOfTexts()
    pairs = {"a": texts, "b": ["x", "yyyy", "", "zz"], "label": torch.ones(4)}
    lists = {"a": texts[:2], "b": [["x", "yyyy"], ["", "zz"]], "label": torch.ones(2)}
    for inputs, num_parts in ((pairs, 2), (lists, 1)):
        plain = trainer.compute_loss(trainer.model, dict(inputs))
        found = loss_of_steps(trainer, inputs)
        assert found == (pytest.approx(plain.item()), num_parts)
    assert with_tokens(TrainerOfPairs(of_pairs), pairs) == (pairs, False)


# --- whole scripts ------------------------------------------------------------------------------

BATCHES = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "4"]
PAIRS = [*BATCHES, "--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2"]
PAIRS += ["--save_steps", "2", "--load_best_model_at_end", "True"]
SHORT = [*BATCHES, "--max_steps", "2", "--bf16", "False", "--save_strategy", "no"]


def compare(name, arguments, tmp_path, microbatches="2"):
    """Runs a script on two stages and plainly. Returns both folders."""
    folder, other = tmp_path / "ours", tmp_path / "plain"
    run_plainly(name, arguments, other)
    run_launched(name, arguments, folder, stages="2", microbatches=microbatches)
    assert_equal_runs(folder, other)
    logs = [
        json.loads((path / "trainer_state.json").read_text())["log_history"]
        for path in (folder, other)
    ]
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        measured = {k for k in ours if not k.endswith(("runtime", "per_second", "flos"))}
        assert {k: ours[k] for k in measured} == pytest.approx(
            {k: theirs[k] for k in measured}, rel=2e-4, abs=2e-6
        )
    return folder, other


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_trainer_with_ways_of_its_own(tmp_path):
    """Batches of pairs, a loss that holds the model, metrics, evaluation, saving and loading."""
    folders = compare("pairs", PAIRS, tmp_path)
    found, expected = (torch.load(path / "predictions.pt") for path in folders)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    resumed = [*PAIRS, "--resume_from_checkpoint", str(folders[0] / "checkpoint-2")]
    run_launched("pairs", resumed, tmp_path / "resumed", stages="2", microbatches="2")
    assert history(tmp_path / "resumed")[:-1] == history(folders[0])[:-1]  # bitwise


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("microbatches", ["1", "2"])
def test_a_loss_that_compares_rows_has_one_microbatch(microbatches, tmp_path):
    compare("pairs", [*PAIRS, "--contrastive", "True"], tmp_path, microbatches)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("reward", [True, False])
def test_trl_trains_on_preferences(reward, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    arguments = [*SHORT, "--reward", str(reward), "--gradient_checkpointing", "False"]
    compare("preferences", [*arguments, "--pad_to_multiple_of", "16"], tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "loss"),
    [
        ("embeddings", "CosineSimilarityLoss"),
        ("embeddings", "TripletLoss"),
        ("embeddings", "MultipleNegativesRankingLoss"),
        ("embeddings", "MatryoshkaLoss"),
        ("reranking", "BinaryCrossEntropyLoss"),
        ("reranking", "ListNetLoss"),
    ],
)
def test_sentence_transformers(script, loss, tmp_path):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    # The gradient of TripletLoss for a common shift of all embeddings is 0 but for rounding.
    arguments = [
        *SHORT,
        "--optim",
        "sgd",
        "--loss",
        loss,
        "--pretrained",
        str(tmp_path / "pretrained"),
    ]
    compare(script, arguments, tmp_path)
