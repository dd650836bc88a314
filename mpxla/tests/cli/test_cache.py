"""`python -m mpxla cache`: what is packed, what is left out, and what is refused."""

import io
import tarfile

import pytest

from mpxla.cli.main import main

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "programs" / "cpu-1"
    place.mkdir(parents=True)
    (place / "0a.kept").write_bytes(b"first")
    (place / "0b.17-4.part").write_bytes(b"half writt")
    return tmp_path / "programs"


def test_programs_travel_in_a_file(folder, tmp_path, capsys):
    file, other = str(tmp_path / "programs.tar"), tmp_path / "other"
    assert main(["cache", "save", file, "--folder", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"1 files of {folder} into ")
    assert main(["cache", "load", file, "--folder", str(other)]) == 0
    assert {str(p.relative_to(other)): p.read_bytes() for p in other.rglob("*") if p.is_file()} == {
        "cpu-1/0a.kept": b"first",
    }
    (other / "cpu-1" / "0a.kept").write_bytes(b"own")
    assert main(["cache", "load", file, "--folder", str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 files of ")
    assert (other / "cpu-1" / "0a.kept").read_bytes() == b"own"


def test_the_users_cache_folder_is_the_default(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mpxla").mkdir(parents=True)
    folder.rename(tmp_path / "cache" / "mpxla" / "programs")
    assert main(["cache", "save", str(tmp_path / "file")]) == 0
    assert capsys.readouterr().out.startswith("1 files")


def test_without_programs_there_is_nothing_to_pack(tmp_path, capsys):
    assert main(["cache", "save", str(tmp_path / "file"), "--folder", str(tmp_path / "no")]) == 1
    assert "has nothing in it. Train first" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()
    assert main(["cache", "load", str(tmp_path / "file")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x.kept", "/tmp/x.kept", "../x.kept", "cpu-1/profile"])
def test_nothing_lands_elsewhere(name, tmp_path, capsys):
    with tarfile.open(tmp_path / "file", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    place = tmp_path / "a" / "b"
    assert main(["cache", "load", str(tmp_path / "file"), "--folder", str(place)]) == 1
    assert f"holds '{name}', which is no file of a job" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file"]
