"""What travels in checkpoints as data, and what does not."""

import argparse
import dataclasses
import tempfile
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import GPT2Config

import mpxla as smp
from mpxla.checkpoint import files
from mpxla.errors import CheckpointError
from mpxla.tests.ranks.run import run_ranks


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Checked:
    rate: float = 0.1

    def __post_init__(self):
        raise AssertionError("code of the class")


@dataclasses.dataclass(init=False)
class Made:
    rate: float

    def __init__(self, rate):
        self.rate = rate


class Reduced(argparse.Namespace):
    def __reduce__(self):
        return Reduced, ()


VALUES = {
    "scalar": np.float32(3.5),
    "count": np.int64(2),
    "flag": np.bool_(True),
    "array": np.arange(6.0).reshape(2, 3),
    "words": np.array(["a", "bc"]),
    "random": np.random.RandomState(1).get_state(),
    "arguments": argparse.Namespace(rate=0.1, layers=[1, 2]),
    "settings": Settings(0.2, ["a"]),
    "configuration": GPT2Config(n_layer=3),
    "tensor": torch.ones(2),
}


@pytest.mark.unit
def test_data_comes_back(tmp_path, caplog):
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize(VALUES, "user_content"))
    assert not caplog.records
    found = files.load_object(path)
    for name in ("scalar", "count", "flag", "arguments", "settings"):
        assert found[name] == VALUES[name] and type(found[name]) is type(VALUES[name])
    for name in ("array", "words"):
        np.testing.assert_array_equal(found[name], VALUES[name])
    np.testing.assert_array_equal(found["random"][1], VALUES["random"][1])
    assert found["configuration"].to_dict() == VALUES["configuration"].to_dict()


@pytest.mark.parametrize("value", [Fraction(1, 2), Made(1.0), Reduced(), print])
@pytest.mark.unit
def test_what_runs_code_of_its_own_is_refused(tmp_path, caplog, value):
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": value}, "user_content"))
    assert "user_content['x'] is " in caplog.text
    assert "so it is refused when the checkpoint is loaded" in caplog.text
    with pytest.raises(CheckpointError, match="holds objects whose loading could run code"):
        files.load_object(path)


NESTED = argparse.Namespace(rates=[1.0, {"half": Fraction(1, 2)}], seed=3)


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        (Fraction(1, 2), "user_content is a fractions.Fraction. Loading it could run code"),
        ({"args": NESTED, "n": 1}, "user_content['args'].rates[1]['half'] is a fractions.Fraction"),
        (
            {"all": (Settings(0.1, [print]),)},
            "user_content['all'][0].names[0] is the function",
        ),
    ],
)
@pytest.mark.unit
def test_saving_names_the_entry_that_loading_would_refuse(value, entry, caplog):
    with pytest.raises(CheckpointError) as refused:
        files.serialize(value, "user_content", has_to_load=True)
    assert str(refused.value).startswith(entry)
    assert "set the key trust_checkpoints: True (with the launcher mpxla.compat, --trust-check" in (
        str(refused.value)
    )
    files.serialize(value, "user_content", is_trusted=True, has_to_load=True)
    assert not caplog.records


def trust():
    smp.init({"trust_checkpoints": True, "microbatches": 1})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 2))
    with tempfile.TemporaryDirectory() as folder:
        for partial in (True, False):
            smp.save_checkpoint(folder, "t", partial, model, user_content=Fraction(1, 2))
            found = smp.resume_from_checkpoint(folder, "t", partial)
            assert found == Fraction(1, 2)
            with pytest.raises(smp.CheckpointError, match="could run code"):
                smp.resume_from_checkpoint(folder, "t", partial, weights_only=True)
        smp.save(Fraction(1, 3), f"{folder}/x", partial=False)
        assert smp.load(f"{folder}/x", partial=False) == Fraction(1, 3)


@pytest.mark.ranks
def test_a_configuration_that_trusts_checkpoints():
    run_ranks(trust, 1)


@pytest.mark.unit
def test_a_class_with_code_after_its_fields_is_refused(tmp_path):
    value = object.__new__(Checked)
    value.__dict__.update(rate=1.0)
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": value}, "user_content"))
    with pytest.raises(CheckpointError, match="Checked"):
        files.load_object(path)


@pytest.mark.unit
def test_nothing_is_imported_because_a_file_says_so(tmp_path, monkeypatch):
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": Settings()}, "user_content"))
    monkeypatch.delitem(__import__("sys").modules, Settings.__module__)
    with pytest.raises(CheckpointError, match="Settings"):
        files.load_object(path)
