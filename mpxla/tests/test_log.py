"""The rank-prefixed logger."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpxla import log

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def fresh_logger():
    yield
    log.set_rank(0, 1)
    log.set_level("INFO")
    log.forget_warnings()


def test_every_line_names_the_rank(capsys):
    log.set_rank(3, 8)
    log.get_logger().info("first %d\nsecond", 1)
    captured = capsys.readouterr()
    assert captured.err == "[mpxla rank 3] first 1\n[mpxla rank 3] second\n"
    assert captured.out == ""


def test_a_single_process_needs_no_rank(capsys):
    log.set_rank(0, 1)
    log.get_logger().info("alone")
    assert capsys.readouterr().err == "[mpxla] alone\n"


def test_severe_messages_name_their_level(capsys):
    log.get_logger().warning("careful")
    log.get_logger().error("broken")
    assert capsys.readouterr().err == "[mpxla] warning: careful\n[mpxla] error: broken\n"


def test_level_hides_what_is_below(capsys):
    log.get_logger().debug("hidden by default")
    log.set_level("DEBUG")
    log.get_logger().debug("shown")
    log.set_level(logging.ERROR)
    log.get_logger().warning("hidden")
    assert capsys.readouterr().err == "[mpxla] shown\n"


def test_children_share_the_prefix(capsys):
    log.set_rank(1, 2)
    log.get_logger().getChild("stage").info("compiled")
    assert capsys.readouterr().err == "[mpxla rank 1] compiled\n"


def test_root_logger_is_left_alone(capsys):
    class Recorder(logging.Handler):
        def emit(self, record):
            received.append(record)

    received = []
    root = logging.getLogger()
    recorder = Recorder()
    root.addHandler(recorder)
    try:
        handlers, level = list(root.handlers), root.level
        log.set_rank(1, 2)
        log.set_level("DEBUG")
        log.get_logger().warning("not for the root")
        assert (root.handlers, root.level) == (handlers, level)
    finally:
        root.removeHandler(recorder)
    assert received == []
    assert capsys.readouterr().err.count("not for the root") == 1


def test_warn_once_shows_each_key_once(capsys):
    log.warn_once("a", "100% of a")
    log.warn_once("a", "a again")
    log.warn_once("b", "b")
    assert capsys.readouterr().err == "[mpxla] warning: 100% of a\n[mpxla] warning: b\n"


def test_warn_once_from_many_threads(capsys):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: log.warn_once("threads", "once"), range(100)))
    assert capsys.readouterr().err == "[mpxla] warning: once\n"


def test_forget_warnings_shows_them_again(capsys):
    log.warn_once("again", "text")
    log.forget_warnings()
    log.warn_once("again", "text")
    assert capsys.readouterr().err.count("text") == 2


def test_a_broken_stream_does_not_stop_training(monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("closed")

    monkeypatch.setattr("sys.stderr", Closed())
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.get_logger().warning("lost")
