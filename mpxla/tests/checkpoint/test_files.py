"""Files that are there completely or not at all."""

import os
import pickle
import resource
import signal
import zlib
from argparse import Namespace
from fractions import Fraction

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from mpxla.checkpoint import files
from mpxla.errors import CheckpointError

pytestmark = pytest.mark.unit

VALUES = {"a": torch.arange(3000.0), "n": [1, None, "x"]}


class Runs:
    """An object whose unpickling makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_record_counts_and_sums_every_byte(tmp_path):
    record = files.save_object(tmp_path / "x.pt", VALUES)
    data = (tmp_path / "x.pt").read_bytes()
    assert record == (len(data), zlib.crc32(data))
    torch.testing.assert_close(files.load_object(tmp_path / "x.pt")["a"], VALUES["a"])
    files.check_file(tmp_path / "x.pt", record)


@pytest.mark.parametrize("position", [0, 1, 700, 5000, -1])
def test_an_altered_byte_anywhere_is_noticed(tmp_path, position):
    path = tmp_path / "x.pt"
    record = files.save_object(path, VALUES)
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pt was altered since it was written \(its"):
        files.check_file(path, record)


def test_a_truncated_or_missing_file_is_noticed(tmp_path):
    path = tmp_path / "x.pt"
    record = files.save_object(path, VALUES)
    os.truncate(path, record.num_bytes - 1)
    with pytest.raises(CheckpointError, match=r"x\.pt has \d+ bytes instead of \d+: it"):
        files.check_file(path, record)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.pt is missing, which the checkpoint needs"):
        files.check_file(path, record)


def test_damage_of_a_file_of_torch_is_noticed_without_a_record(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(VALUES, path)
    files.check_zip(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pt was altered since it was written \(its par"):
        files.check_zip(path)
    path.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"x\.pt was truncated or altered"):
        files.check_zip(path)
    (tmp_path / "text").write_text("no zip")
    files.check_zip(tmp_path / "text")


def test_nothing_runs_unless_asked_for(tmp_path):
    made = tmp_path / "made"
    torch.save({"x": Runs(made)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt holds objects whose loading could run c"):
        files.load_object(tmp_path / "evil.pt")
    assert not made.exists()
    files.load_object(tmp_path / "evil.pt", weights_only=False)
    assert made.exists(), "the payload works"


def test_torchs_distributed_checkpoint_runs_code_when_it_loads(tmp_path):
    """Why it is not used: its metadata is unpickled whatever it holds (torch 2.9)."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "made")))
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "made").exists()


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK nonsense")
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read, it may be truncated"):
        files.load_object(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"y\.pt does not exist; check the path"):
        files.load_object(tmp_path / "y.pt")


def test_replacing_leaves_the_old_file_if_it_fails(tmp_path):
    path = tmp_path / "x"
    files.replace_file(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*x\.\d+-\w+\.writing"):
            files.replace_files(
                {
                    tmp_path / "y": lambda file: file.write(b"y"),
                    path: lambda file: torch.save(VALUES, file),
                }
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    for name in (".x.77.writing", ".x[1].77.writing", "x"):
        (tmp_path / name).touch()
    files.remove_stale(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == [".x[1].77.writing", "x"]
    files.remove_stale(tmp_path / "x[1]")
    assert os.listdir(tmp_path) == ["x"]


def test_content_that_cannot_be_saved_or_needs_trust_is_told(caplog):
    text = r"user_content\['f'\] is the function .*lambda> and cannot be saved: .*Keep plain"
    with pytest.raises(CheckpointError, match=text):
        files.serialize({"f": lambda: None}, "user_content")
    assert files.serialize({"n": 1, "t": torch.ones(2)}, "user_content")
    assert not caplog.records
    files.serialize(Namespace(a=1), "user_content")
    assert not caplog.records
    files.serialize(Fraction(1, 2), "user_content")
    assert "a fractions.Fraction. Loading it could run code (fractions.Fraction)" in caplog.text
