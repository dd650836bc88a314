"""A checkpoint is there completely or not at all, whoever is killed whenever."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from mpxla.checkpoint import commit
from mpxla.checkpoint.commit import partial_tags
from mpxla.checkpoint.files import FileRecord, save_object
from mpxla.checkpoint.layout import partial_folder, read_newest
from mpxla.checkpoint.together import BackgroundExchange, together
from mpxla.comm.codec import DATA
from mpxla.comm.handle import Failure
from mpxla.comm.objects import Objects
from mpxla.errors import CheckpointError, MpxlaError, PeerFailure
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.comm.worlds import run_threads

pytestmark = pytest.mark.unit

FACTS = {"about": "all"}


class Alone:
    rank, world_size = 0, 1

    def allgather(self, value):
        return [value]

    def working(self):
        return contextlib.nullcontext()


def writer(number, rank=0):
    def write(folder):
        name = f"model_{rank}_0_0.pt"
        record = save_object(folder / name, {"w": torch.full((3000,), float(number))})
        return commit.Written({name: record}, {"number": number})

    return write


def save(path, tag, number, num_kept=None):
    token = str(number)
    commit.prepare(path, tag, token)
    commit.write_partial(path, tag, token, Alone(), writer(number), FACTS, num_kept)


def load(path, tag=None):
    """(tag, number) of a checkpoint after checking all of it."""
    tag = tag or read_newest(path)
    folder = commit.find_partial(path, tag)
    manifest = commit.read_manifest(folder, tag)
    for part in range(2):
        commit.check_share(folder, manifest, part, 2)
    numbers = set()
    for name in manifest["files"]:
        numbers |= set(torch.load(folder / name)["w"].tolist())
    (number,) = numbers
    assert [part["number"] for part in manifest["parts"]] == [number] * len(manifest["parts"])
    return tag, number


def test_a_checkpoint_is_saved_and_replaced(tmp_path):
    save(tmp_path / "deep" / "er", "a", 1)
    path = tmp_path / "deep" / "er"
    assert load(path) == ("a", 1)
    save(path, "b", 2)
    save(path, "a", 3)
    assert load(path) == ("a", 3)
    assert load(path, "b") == ("b", 2)
    assert sorted(os.listdir(path)) == ["a_partial", "b_partial", "newest"]


def test_old_ones_are_deleted(tmp_path):
    for number in range(5):
        save(tmp_path, f"t{number}", number, num_kept=2)
    assert partial_tags(tmp_path) == ["t3", "t4"]
    save(tmp_path, "t3", 9, num_kept=1)
    assert partial_tags(tmp_path) == ["t3"]
    assert load(tmp_path) == ("t3", 9)


def test_copied_folders_keep_their_order(tmp_path):
    """Copies are as old as the copying says."""
    for number, tag in enumerate(["c", "a", "b"]):
        save(tmp_path, tag, number)
    for number, tag in enumerate(["a", "b", "c"]):
        os.utime(tmp_path / f"{tag}_partial" / "manifest.json", (number, number))
    assert partial_tags(tmp_path) == ["c", "a", "b"]
    save(tmp_path, "d", 4, num_kept=2)
    assert partial_tags(tmp_path) == ["b", "d"]
    os.truncate(tmp_path / "b_partial" / "manifest.json", 9)
    assert set(partial_tags(tmp_path)) == {"b", "d"}, "also a damaged one is there"


def test_what_killed_attempts_left_goes_with_the_next_one(tmp_path):
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    commit.prepare(tmp_path, "c", "killed")
    (tmp_path / ".d_partial.removed").mkdir()
    shutil.copytree(tmp_path / "b_partial", tmp_path / ".b_partial.replaced")
    os.rename(tmp_path / "a_partial", tmp_path / ".a_partial.replaced")
    assert load(tmp_path, "a") == ("a", 1), "though its replacement was interrupted"
    save(tmp_path, "e", 3)
    assert sorted(os.listdir(tmp_path)) == ["a_partial", "b_partial", "e_partial", "newest"]
    assert load(tmp_path, "a") == ("a", 1)


def test_two_jobs_that_save_to_one_folder_do_not_mix(tmp_path):
    save(tmp_path, "a", 1)
    commit.prepare(tmp_path, "b", "one")
    commit.prepare(tmp_path, "b", "other")
    with pytest.raises(CheckpointError, match=r"one\.writing is not there, or was removed mean"):
        commit.write_partial(tmp_path, "b", "one", Alone(), writer(2), FACTS, None)
    commit.write_partial(tmp_path, "b", "other", Alone(), writer(3), FACTS, None)
    assert load(tmp_path) == ("b", 3)


def test_a_failed_attempt_changes_nothing(tmp_path):
    save(tmp_path, "a", 1)

    def fail(folder):
        (folder / "half").touch()
        raise OSError(28, "No space left on device", str(folder / "half"))

    commit.prepare(tmp_path, "b", "1")
    with pytest.raises(
        CheckpointError, match=r"saving checkpoint 'b' .* failed on rank 0: .*half:"
    ):
        commit.write_partial(tmp_path, "b", "1", Alone(), fail, FACTS, None)
    assert sorted(os.listdir(tmp_path)) == ["a_partial", "newest"]
    assert load(tmp_path) == ("a", 1)


def test_files_that_rank_0_does_not_see_are_an_error(tmp_path):
    def elsewhere(folder):
        return commit.Written({"model_1_0_0.pt": FileRecord(5, 5)}, {})

    commit.prepare(tmp_path, "b", "1")
    with pytest.raises(CheckpointError, match=r"model_1_0_0\.pt was written by another rank but"):
        commit.write_partial(tmp_path, "b", "1", Alone(), elsewhere, FACTS, None)
    with pytest.raises(CheckpointError, match=r"no partial checkpoint 'b' in .*checkpoints: none"):
        commit.find_partial(tmp_path, "b")


def damaged(path, change):
    save(path, "a", 1)
    folder = partial_folder(path, "a")
    change(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing, so .* is no compl"),
        (lambda f: os.truncate(f / "manifest.json", 40), r"manifest\.json was truncated or alter"),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace("number", "member", 1)
            ),
            r"manifest\.json was altered since",
        ),
        (
            lambda f: f.rename(f.with_name("b_partial")),
            r"no partial checkpoint 'a' in .*ts: b",
        ),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, change, text):
    damaged(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, "a")


def test_mixed_up_folders_are_refused(tmp_path):
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    shutil.copytree(tmp_path / "a_partial", tmp_path / "c_partial")
    with pytest.raises(CheckpointError, match=r"belongs to the checkpoint 'a', not to 'c'"):
        load(tmp_path, "c")
    for name in ("model_0_0_0.pt",):
        shutil.copy(tmp_path / "a_partial" / name, tmp_path / "b_partial" / name)
    with pytest.raises(CheckpointError, match=r"b_partial/model_0_0_0\.pt was altered"):
        load(tmp_path, "b")


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "FORMAT", 7)
    save(tmp_path, "a", 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 7, and this version of mpxla reads 1"):
        load(tmp_path, "a")


# --- together -----------------------------------------------------------------------------------


def divide(transport):
    exchange = BackgroundExchange(transport)
    assert together(exchange, "first", lambda: transport.rank * 10) == [0, 10, 20]
    with pytest.raises(CheckpointError) as caught:
        together(exchange, "second", lambda: 1 // (transport.rank - 1))
    return str(caught.value)


def test_an_error_on_one_rank_is_an_error_on_all():
    text = "second failed on rank 1: ZeroDivisionError: integer division or modulo by zero"
    assert run_threads(divide, 3) == [text] * 3


def fail_alike(transport):
    def fail():
        raise CheckpointError("same")

    with pytest.raises(CheckpointError, match=r"^it failed on rank 0, 1: same$"):
        together(BackgroundExchange(transport), "it", fail)


def test_equal_errors_are_told_once():
    run_threads(fail_alike, 2)


def test_waiting_for_a_dead_rank_ends():
    transport, _ = threads_world(2)
    exchange = BackgroundExchange(transport)
    transport.watch.set_failure(Failure(1, "rank 1 died"))
    with pytest.raises(PeerFailure, match=r"^rank 1 died \(.* for rank 1's part of a checkpoint"):
        exchange.allgather(1)
    assert exchange.wait is None


def test_what_strangers_send_is_not_believed():
    transport, stranger = threads_world(2)
    stranger.seal._key = b"a guess"
    stranger.send([torch.tensor(list(b"1"), dtype=torch.uint8)], 0, "checkpoint")
    Objects(stranger, DATA._replace(channel="checkpoint")).post(1, (0,), "a forgery")
    for _ in range(2):
        with pytest.raises(MpxlaError, match="do not come from rank 1 of this job"):
            BackgroundExchange(transport).allgather(1)


# --- flushing -----------------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """What a kill cannot show: what the system has not written yet is lost with its power."""
    events = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def flushed(descriptor):
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real["fsync"](descriptor)

    def renamed(name):
        def call(source, target):
            events.append(f"{Path(source).name} -> {Path(target).name}")
            real[name](source, target)

        return call

    monkeypatch.setattr(os, "fsync", flushed)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renamed(name))
    save(tmp_path, "a", 1)
    temporary = r"\.newest\.[\w-]+\.writing"
    expected = [
        f"flush {tmp_path.name}",
        *(r"flush model_0_0_0\.pt", r"flush manifest\.json", r"flush \.a_partial\.1\.writing"),
        *(r"\.a_partial\.1\.writing -> a_partial", f"flush {tmp_path.name}"),
        *(f"flush {temporary}", f"{temporary} -> newest", f"flush {tmp_path.name}"),
    ]
    assert len(events) == len(expected), events
    for event, pattern in zip(events, expected, strict=True):
        assert re.fullmatch(pattern, event), events


# --- SIGKILL ------------------------------------------------------------------------------------


class PipeExchange(Alone):
    """Between two processes; who is alone waits for ever."""

    world_size = 2

    def __init__(self, rank, pipe):
        self.rank, self._pipe = rank, pipe

    def allgather(self, value):
        self._pipe.send(value)
        other = self._pipe.recv()
        return [value, other] if self.rank == 0 else [other, value]


def save_for_ever(path, pipe, rank, first):
    """One rank of two that save one checkpoint after the other."""
    exchange = PipeExchange(rank, pipe)
    number = first
    while True:
        number += 1
        tag, token = f"t{number % 3}", str(number)  # tags come again: replacing is met as well
        if rank == 0:
            commit.prepare(path, tag, token)
        exchange.allgather("ready")
        commit.write_partial(path, tag, token, exchange, writer(number, rank), FACTS, 2)


def time_of_newest(path):
    file = path / "newest"
    return file.stat().st_mtime_ns if file.exists() else 0


def kill_at_random(path, moments, seed):
    """Kills one of two saving processes at random moments; after each, a checkpoint loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mpxla.tests.checkpoint.test_commit"])
    choose = random.Random(seed)
    newest = 0.0
    for _ in range(moments):
        pipes = context.Pipe()
        before = time_of_newest(path / "saved")
        ranks = [
            context.Process(target=save_for_ever, args=(path / "saved", pipe, rank, int(newest)))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while time_of_newest(path / "saved") == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(choose.uniform(0, 0.06))  # a save takes about 20 ms
        ranks[choose.randrange(2)].kill()
        time.sleep(choose.uniform(0, 0.01))
        for process in ranks:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        _, number = load(path / "saved")
        assert number > newest, "the newest checkpoint never goes back"
        newest = number
    return newest


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path):
    assert kill_at_random(tmp_path, 12, seed=1) >= 12


@pytest.mark.slow
def test_many_kills_leave_a_checkpoint(tmp_path):
    assert kill_at_random(tmp_path, 60, seed=2) >= 60


OPERATIONS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def save_until(path, tag, number, limit):
    """Saves, and dies as by SIGKILL right before file operation number `limit`."""
    count = 0

    def counted(original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == limit:
                os._exit(9)
            return original(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    save(path, tag, number, num_kept=1)
    os._exit(0)


@pytest.mark.parametrize("tag", ["same", "other"])
def test_a_kill_before_every_file_operation_leaves_a_checkpoint(tmp_path, tag):
    """Also between the two renames that replace a checkpoint of the same tag."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mpxla.tests.checkpoint.test_commit"])
    limit, code, seen = 0, 9, []
    while code == 9:
        limit += 1
        path = tmp_path / str(limit)
        save(path, "same", 1)
        process = context.Process(target=save_until, args=(path, tag, 2, limit))
        process.start()
        process.join()
        code = process.exitcode
        seen.append(load(path))
        save(path, tag, 3)
        assert load(path) == (tag, 3), "and the next attempt works"
    assert code == 0 and limit > 10
    assert seen[0] == ("same", 1) and seen[-1] == (tag, 2)
    numbers = [number for _, number in seen]
    assert numbers == sorted(numbers)


def test_the_manifest_is_plain_json(tmp_path):
    save(tmp_path, "a", 1)
    sealed = json.loads((tmp_path / "a_partial" / "manifest.json").read_text())
    assert json.loads(sealed["body"])["about"] == "all"
