"""State dicts on the disk, of torch and of Hugging Face."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file

from mpxla.checkpoint.full import open_state
from mpxla.errors import CheckpointError

pytestmark = pytest.mark.unit

STATE = {"a.weight": torch.arange(600.0).view(20, 30), "b": torch.ones(3, dtype=torch.bfloat16)}


def index(folder, weight_map):
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    return file


def written(folder):
    """The state in every form that is read."""
    torch.save(STATE, folder / "x.pt")
    torch.save(STATE, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(STATE, folder / "x.safetensors")
    save_file({"b": STATE["b"]}, folder / "part.safetensors")
    torch.save({"a.weight": STATE["a.weight"]}, folder / "part.bin")
    parts = index(folder, {"a.weight": "part.bin", "b": "part.safetensors"})
    return [folder / "x.pt", folder / "old.pt", folder / "x.safetensors", parts]


def test_every_form_has_the_same_values(tmp_path):
    for file in written(tmp_path):
        source = open_state(file)
        assert source.shapes == {"a.weight": (20, 30), "b": (3,)}, file
        for name, value in STATE.items():
            assert source.read(name).dtype == value.dtype
            assert torch.equal(source.read(name), value), (file, name)


def rename(saved):
    return {name.removeprefix("a."): value for name, value in saved.items()}


def test_names_are_translated_in_every_form(tmp_path):
    for file in written(tmp_path):
        source = open_state(file, translate=rename)
        assert list(source.shapes) == ["weight", "b"]
        assert torch.equal(source.read("weight"), STATE["a.weight"])


def test_truncated_files_are_named(tmp_path):
    for file in written(tmp_path)[:3]:
        os.truncate(file, 900)
        text = rf"{file.name} (was|cannot be read, .* be) truncated or altered"
        with pytest.raises(CheckpointError, match=text):
            open_state(file)
    part = tmp_path / "part.safetensors"
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"part\.safetensors cannot be read, it may be trunc"):
        open_state(tmp_path / "model.safetensors.index.json")


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    written(tmp_path)
    wrong = index(tmp_path, {"c": "part.safetensors"})
    with pytest.raises(CheckpointError, match=r"says that c is in part\.safetensors, which does n"):
        open_state(wrong)
    missing = index(tmp_path, {"c": "nowhere.safetensors"})
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors does not exist; check the pa"):
        open_state(missing)
    for text in ("{}", "[1]", "no json"):
        missing.write_text(text)
        with pytest.raises(CheckpointError, match=r"is no index of model files \(it has no weight"):
            open_state(missing)


def test_what_is_no_state_dict_is_refused(tmp_path):
    torch.save([1], tmp_path / "list")
    with pytest.raises(CheckpointError, match=r"list holds a list, not a state dict; save model"):
        open_state(tmp_path / "list")
    torch.save({"model": STATE}, tmp_path / "inside")
    with pytest.raises(CheckpointError, match=r"'model' is a dict\. If the state dict is inside"):
        open_state(tmp_path / "inside")
    with pytest.raises(CheckpointError, match=r"list holds a NoneType, not a state dict"):
        open_state(tmp_path / "list", translate=lambda saved: None)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"needs the package safetensors; install it with pi"):
        open_state(tmp_path / "x.safetensors")
