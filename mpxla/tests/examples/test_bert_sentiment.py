"""Sentiments: the losses of the plain script, and a folder that plain transformers reads."""

import csv
from collections import Counter

import pytest

from mpxla.tests.examples.running import EXAMPLES, RELATIVE_TOLERANCE, load_beside, run_example
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

FOLDER = EXAMPLES / "bert_sentiment"
TINY = ("--width", "16", "--layers", "1", "--dropout", "0")
ACCURACY_TOLERANCE = 0.06
"""With replicas the incomplete batches of the test are dropped."""


@pytest.fixture
def few_sentences(tmp_path):
    path = tmp_path / "few.csv"
    path.write_text("".join((FOLDER / "sentences.csv").read_text().splitlines(True)[:61]))
    return path


def check_against_plain(num_ranks, num_stages, *options, plain=(), split=()):
    """Trains twice and compares; `plain` and `split` are options of one script only."""
    ((*expected, accuracy),) = run_example("bert_sentiment/train_plain.py", 1, *options, *plain)
    arguments = (*options, *split, "--stages", str(num_stages), "--microbatches", "2")
    for *losses, reached in run_example("bert_sentiment/train.py", num_ranks, *arguments):
        assert losses == pytest.approx(expected, rel=RELATIVE_TOLERANCE)
        assert reached == pytest.approx(accuracy, abs=ACCURACY_TOLERANCE)


def predictions(folder, sentences):
    """Sentiments by the script that knows plain transformers only."""
    (found,) = run_example(
        "bert_sentiment/classify.py", 1, str(folder), *sentences, result="sentiments"
    )
    return found


@pytest.mark.slow
def test_two_stages_write_what_transformers_reads(few_sentences, tmp_path):
    plain, split = tmp_path / "plain", tmp_path / "split"
    options = (*TINY, "--data", str(few_sentences), "--epochs", "2", "--batch-size", "12")
    check_against_plain(
        2, 2, *options, plain=("--output-dir", plain), split=("--output-dir", split)
    )
    sentences = ["The soup was cold.", "What a lovely day!", "The bus leaves at noon."]
    assert predictions(split, sentences) == predictions(plain, sentences)


@pytest.mark.slow
def test_two_replicas_of_two_stages(few_sentences):
    options = (*TINY, "--data", str(few_sentences), "--epochs", "3", "--batch-size", "12")
    check_against_plain(4, 2, *options)


def test_every_class_has_a_hundred_sentences():
    with (FOLDER / "sentences.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["sentiment"] for row in rows) == {
        "negative": 100,
        "neutral": 100,
        "positive": 100,
    }
    assert len({row["sentence"] for row in rows}) == 300


def vocabulary():
    data = load_beside("bert_sentiment", "sentiment_data")
    sentences = [sentence for sentence, _ in data.read_sentences(FOLDER / "sentences.csv")]
    return data.train_tokenizer(sentences).get_vocab()


def test_all_processes_train_the_same_tokenizer():
    first, second = run_ranks(vocabulary, 2)
    assert first == second
    assert len(first) == 1000


def read(path):
    return load_beside("bert_sentiment", "sentiment_data").read_sentences(path)


def read_error(path):
    try:
        read(path)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was read")


def test_a_row_without_a_class_is_named(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("sentence,sentiment\nFine.,positive\nOdd.,sad\n")
    (text,) = run_ranks(read_error, 1, path)
    assert text == (
        f"{path}, line 3: expected a sentence and one of negative, neutral, positive, "
        "found ['Odd.', 'sad']"
    )
