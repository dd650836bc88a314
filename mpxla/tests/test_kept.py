"""Values that starts leave for each other: what is found, what is not, and a folder that fails."""

import os
import time

import pytest

from mpxla import kept
from mpxla.kept import Kept, key_of, open_kept

pytestmark = pytest.mark.unit


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_value_is_found_by_another_start(tmp_path):
    first = open_kept(str(tmp_path / "new"), "cpu-1")
    assert first and first.get("ab") is None
    first.put("ab", b"value" * 1000)
    second = open_kept(str(tmp_path / "new"), "cpu-1")
    assert second.get("ab") == b"value" * 1000
    assert (second.num_found, second.num_added, first.num_added) == (1, 0, 1)
    assert open_kept(str(tmp_path / "new"), "cpu-2").get("ab") is None
    for place in (tmp_path / "new", tmp_path / "new" / "cpu-1"):
        assert place.stat().st_mode & 0o777 == 0o700
    assert files(tmp_path) == ["ab.kept"]


def test_without_a_folder_nothing_is_kept():
    nothing = open_kept("", "cpu-1")
    nothing.put("ab", b"value")
    assert not nothing and nothing.get("ab") is None


def refuse(*_, **__):
    raise PermissionError


def test_what_was_made_is_not_made_again(tmp_path, caplog):
    one = open_kept(str(tmp_path), "cpu-1")
    assert one.recall("ab", lambda: 3, lambda value: b"%d" % value, int) == 3
    assert one.recall("ab", refuse, refuse, int) == 3
    assert one.recall(None, lambda: 4, refuse, refuse) == 4, "what it follows from is not known"
    assert Kept().recall("ab", lambda: 4, refuse, refuse) == 4
    assert not caplog.text
    assert one.recall("ab", lambda: 5, lambda value: b"%d" % value, refuse) == 5
    assert "what an earlier start has kept cannot be read, and is made anew" in caplog.text
    assert one.recall("ab", refuse, refuse, int) == 5
    assert one.recall("cd", lambda: 6, refuse, int) == 6, "nobody can write it down"
    assert files(tmp_path) == ["ab.kept"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_torn_file_goes(tmp_path, content):
    first = open_kept(str(tmp_path), "cpu-1")
    first.put("ab", b"value")
    (path,) = tmp_path.glob("*/*.kept")
    path.write_bytes(content)
    assert first.get("ab") is None and not path.exists()
    first.put("ab", b"value")
    assert first.get("ab") == b"value"


def test_a_torn_file_that_cannot_go_is_not_found(tmp_path, monkeypatch):
    first = open_kept(str(tmp_path), "cpu-1")
    first.put("ab", b"value")
    (path,) = tmp_path.glob("*/*.kept")
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(type(path), "unlink", refuse)
    assert first.get("ab") is None and path.exists()


def test_what_was_used_least_recently_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_CHECKED_EVERY", 1)
    first = open_kept(str(tmp_path), "cpu-1")
    values = {name: os.urandom(1000) for name in ("a", "b", "c", "d")}
    for age, name in enumerate(("a", "b", "c")):
        first.put(name, values[name])
        past = time.time() - 100 + age
        os.utime(tmp_path / "cpu-1" / f"{name}.kept", (past, past))
    assert first.get("a") == values["a"], "and is used"
    monkeypatch.setattr(kept, "MAX_BYTES", 3500)
    first.put("d", values["d"])
    assert files(tmp_path) == ["a.kept", "c.kept", "d.kept"]


def test_what_a_killed_process_has_half_written_goes(tmp_path):
    folder = tmp_path / "cpu-1"
    folder.mkdir()
    old, new = folder / "ab.1-2.part", folder / "ab.3-4.part"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    open_kept(str(tmp_path), "cpu-1")
    assert files(tmp_path) == [new.name]


def test_a_folder_that_cannot_be_made_is_said(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert not open_kept(str(tmp_path / "file"), "cpu-1")
    assert "compiled programs are not kept" in caplog.text
    assert "Set compile_cache to a folder that can be written" in caplog.text


def test_a_user_without_a_home_keeps_nothing(caplog, monkeypatch):
    def refuse(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kept.Path, "expanduser", refuse)
    assert not open_kept("~/.cache/mpxla/programs", "cpu-1")
    assert "cannot be used (Could not determine home directory.)" in caplog.text


def test_a_folder_that_goes_is_said_once(tmp_path, caplog):
    first = open_kept(str(tmp_path / "new"), "cpu-1")
    (tmp_path / "new" / "cpu-1").rmdir()
    for name in ("a", "b"):
        first.put(name, b"value")
        assert first.get(name) is None
    assert caplog.text.count("compiled programs are not kept") == 1


def test_keys_follow_from_texts_and_code(monkeypatch):
    assert key_of("a", "b") == key_of("a", "b")
    keys = {key_of(*texts) for texts in (("a", "b"), ("b", "a"), ("ab",), ("ab", ""), ())}
    assert len(keys) == 5
    monkeypatch.setattr(kept, "_stamp", lambda: b"of another version")
    assert key_of("a", "b") not in keys


def test_the_code_counts(tmp_path, monkeypatch):
    package = tmp_path / "mpxla"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(kept.mpxla, "__file__", str(package / "__init__.py"))
    stamp = kept._stamp.__wrapped__
    before = stamp()
    (package / "tests" / "test_a.py").write_text("1")
    assert stamp() == before
    (package / "a.py").write_text("1")
    after = stamp()
    assert after != before
    (package / "a.py").write_text("2")
    assert stamp() != after


def test_nothing_is_kept_by_default():
    assert not Kept()
