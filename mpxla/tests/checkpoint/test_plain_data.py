"""What travels in checkpoints as data, and what does not."""

import argparse
import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from mpxla.checkpoint import files
from mpxla.errors import CheckpointError

pytestmark = pytest.mark.unit


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
def test_what_runs_code_of_its_own_is_refused(tmp_path, caplog, value):
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": value}, "user_content"))
    assert "loaded only with weights_only=False" in caplog.text
    with pytest.raises(CheckpointError, match="holds objects whose loading could run code"):
        files.load_object(path)


def test_a_class_with_code_after_its_fields_is_refused(tmp_path):
    value = object.__new__(Checked)
    value.__dict__.update(rate=1.0)
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": value}, "user_content"))
    with pytest.raises(CheckpointError, match="Checked"):
        files.load_object(path)


def test_nothing_is_imported_because_a_file_says_so(tmp_path, monkeypatch):
    path = tmp_path / "content.pt"
    path.write_bytes(files.serialize({"x": Settings()}, "user_content"))
    monkeypatch.delitem(__import__("sys").modules, Settings.__module__)
    with pytest.raises(CheckpointError, match="Settings"):
        files.load_object(path)
