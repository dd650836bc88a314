"""No file of a checkpoint can make loading it run code."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch

import mpxla as smp
from mpxla.tests.checkpoint.worlds import Run
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

PARTITION = "part_partial/partition.pt"


class Runs:
    """An object whose unpickling makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def save_everything(path):
    run = Run(stages=2)
    run.train(1)
    run.save(path, "part")
    smp.save_checkpoint(path, "whole", partial=False, model=run.model, user_content={"n": 5})
    smp.save(run.model.local_state_dict(), f"{path}/file")


def poisoned(file, made):
    """Puts a payload into a file, and its checksum into the manifest, as a forger would."""
    torch.save({"x": Runs(made)}, file)
    manifest = file.parent / "manifest.json"
    if not manifest.exists():
        return
    body = json.loads(json.loads(manifest.read_text())["body"])
    data = file.read_bytes()
    body["files"][file.name] = [len(data), zlib.crc32(data)]
    text = json.dumps(body)
    manifest.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "body": text}))


def error_of(action):
    try:
        action()
    except smp.CheckpointError as error:
        return str(error)
    return None


def load_everything(resumed, loaded):
    run = Run(stages=2)
    early = {name: error_of(lambda o=options: run.resume(**o)) for name, options in resumed.items()}
    smp.shutdown()
    run = Run(stages=2)
    run.train(1)  # afterwards values are read at once
    later = {name: error_of(lambda o=options: run.resume(**o)) for name, options in resumed.items()}
    files = {name: error_of(lambda f=file: smp.load(f)) for name, file in loaded.items()}
    return {**later, **files, PARTITION: early[PARTITION]}


def test_a_payload_in_any_file_is_not_run(tmp_path):
    good = tmp_path / "good"
    run_ranks(save_everything, 2, str(good))
    partial = sorted(f.name for f in (good / "part_partial").glob("*.pt"))
    assert len(partial) == 9
    files = {f"part_partial/{name}": {"tag": "part"} for name in partial}
    files |= {name: {"tag": "whole", "partial": False} for name in ("whole", "user_content_whole")}
    files |= {f"file_{rank}": {} for rank in (0, 1)}
    resumed, loaded, made = {}, {}, {}
    for number, (name, options) in enumerate(files.items()):
        copy, made[name] = tmp_path / f"copy{number}", tmp_path / f"made{number}"
        shutil.copytree(good, copy)
        poisoned(copy / name, made[name])
        if name.startswith("file"):
            loaded[name] = str(copy / "file")
        else:
            resumed[name] = {"path": str(copy), **options}
    one, other = run_ranks(load_everything, 2, resumed, loaded)
    name_of_first = next(iter(files))
    for name in files:
        assert not made[name].exists(), name
        told = [error for error in (one[name], other[name]) if error is not None]
        assert len(told) == (1 if name in loaded else 2), "one rank reads a file of its own"
        for error in told:
            pattern = rf"{re.escape(Path(name).name)} holds objects whose loading could run code"
            assert re.search(pattern, error), (name, error)
    torch.load(tmp_path / "copy0" / name_of_first, weights_only=False)
    assert made[name_of_first].exists(), "the payload works"
