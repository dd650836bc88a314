import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from mpxla.comm import secret as module
from mpxla.comm.secret import Trust, agree_on_key, create_secret_file, read_secret_file
from mpxla.errors import ConfigError, MpxlaError, PeerFailure, RankMismatch

pytestmark = pytest.mark.unit

SECRET = "s" * 64


def agree(secrets, store=None, runtime_dir=None):
    """Key or error of every rank."""
    store = store or dist.HashStore()

    def one(rank):
        try:
            return agree_on_key(store, rank, len(secrets), secrets[rank], runtime_dir, 20.0)
        except MpxlaError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(one, range(len(secrets))))


def only(values):
    assert len(set(values)) == 1, values
    return values[0]


def test_ranks_of_one_host_share_a_secret_by_a_file_that_is_gone_afterwards(tmp_path):
    trust = only(agree([None] * 3, runtime_dir=str(tmp_path)))
    assert isinstance(trust, Trust) and trust.is_one_host and len(trust.key) == 32
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_passed_over():
    assert isinstance(only(agree([None] * 2, runtime_dir="/nonexistent")), Trust)


def test_every_session_has_another_key():
    keys = [only(agree([SECRET] * 2)).key for _ in range(2)]
    assert len(set(keys)) == 2


def test_nothing_in_the_store_gives_the_secret_away(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(module._Board, "write", recording(module._Board.write, written))
    trusts = agree([None] * 2, runtime_dir=str(tmp_path)) + agree([SECRET] * 2)
    text = repr(written)
    assert SECRET not in text
    assert all(trust.key.hex() not in text for trust in trusts)


def recording(write, written):
    def write_and_record(board, name, value):
        written.append((name, value))
        write(board, name, value)

    return write_and_record


def test_another_secret_is_an_error_on_all_ranks_that_names_it():
    texts = [str(error) for error in agree([SECRET, SECRET, "t" * 64])]
    assert only(texts) == (
        "ranks [2] have another secret than rank 0. Set MPXLA_SECRET to the same value on all "
        "ranks."
    )


def test_a_secret_on_some_ranks_only_is_an_error_on_all():
    errors = agree([SECRET, None])
    assert all(isinstance(error, RankMismatch) for error in errors)
    assert "set on some ranks but not on ranks [1]" in only([str(error) for error in errors])


def test_several_hosts_need_a_secret(monkeypatch):
    names = iter(["left 1", "right 2"])
    monkeypatch.setattr(module, "host_identity", lambda: next(names))
    errors = agree([None, None])
    assert all(isinstance(error, ConfigError) for error in errors)
    text = only([str(error) for error in errors])
    assert "several hosts (left, right), and MPXLA_SECRET is not set" in text
    assert "export MPXLA_SECRET=$(python3 -c" in text


def test_several_hosts_with_a_secret(monkeypatch):
    names = iter(["left 1", "right 2"])
    monkeypatch.setattr(module, "host_identity", lambda: next(names))
    trust = only(agree([SECRET] * 2))
    assert isinstance(trust, Trust) and not trust.is_one_host


def test_a_number_of_its_own_protects_a_rank_from_an_old_session(monkeypatch):
    """Somebody who puts all of an old session in the store, also over what is written now."""
    old = dist.HashStore()
    before = only(agree([SECRET] * 2, old))
    monkeypatch.setattr(module._Board, "write", lambda board, name, value: None)
    assert agree_on_key(old, 0, 2, SECRET, None, 1.0).key != before.key


def test_a_missing_rank_is_named_and_leaves_no_file(tmp_path):
    with pytest.raises(PeerFailure, match=r"rank 0 waited 0\.2 s for rank 1 to start mpxla"):
        agree_on_key(dist.HashStore(), 0, 2, None, str(tmp_path), 0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_something_else_in_it_is_an_error():
    store = dist.HashStore()
    store.set("mpxla_trust/start/1", '"nonsense"')
    with pytest.raises(MpxlaError, match="holds 'nonsense' where rank 1 describes itself"):
        agree_on_key(store, 0, 2, SECRET, None, 1.0)


def test_file_is_private(tmp_path):
    previous = os.umask(0)
    try:
        file = create_secret_file(SECRET, str(tmp_path))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.parent.parent == tmp_path
    assert read_secret_file(file) == SECRET


def loosen_file(file):
    file.chmod(0o640)


def loosen_folder(file):
    file.parent.chmod(0o755)


def give_away(file):
    os.chown(file, 12345, -1)


def link(file):
    file.rename(file.parent / "elsewhere")
    file.symlink_to(file.parent / "elsewhere")


def fill_with_something_else(file):
    file.write_text("-----BEGIN OPENSSH PRIVATE KEY-----")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (loosen_file, "not private to user"),
        (loosen_folder, "not private to user"),
        pytest.param(
            give_away,
            "not private to user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"),
        ),
        (link, "symbolic links"),
        (fill_with_something_else, "holds no secret of mpxla"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_believed(tmp_path, change, text):
    file = create_secret_file(SECRET, str(tmp_path))
    change(file)
    with pytest.raises((OSError, ValueError), match=text):
        read_secret_file(file)


def test_a_rank_that_cannot_read_the_file_is_an_error_on_all(tmp_path, monkeypatch):
    def unreadable(file):
        raise FileNotFoundError(f"no {Path(file).name}")

    monkeypatch.setattr(module, "read_secret_file", unreadable)
    texts = [str(error) for error in agree([None] * 2, runtime_dir=str(tmp_path))]
    assert "rank 1 cannot share a secret" in only(texts) and "no secret" in texts[0]
    assert "Set MPXLA_SECRET instead" in texts[0] and list(tmp_path.iterdir()) == []


def test_the_document_says_how_to_make_a_secret():
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert module._HOW_TO_MAKE.split("\n")[1].strip() in text
