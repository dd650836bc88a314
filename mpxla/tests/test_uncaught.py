"""What a user reads when an error ends the script: in full on one rank, by the user's frames."""

import contextlib
import functools
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import mpxla as smp
from mpxla.comm.quiet import without_gloos_lines
from mpxla.errors import ConfigError, MpxlaError, PeerFailure
from mpxla.session import show_uncaught
from mpxla.tests.ranks.run import run_ranks
from mpxla.uncaught import UncaughtErrors, format_error, show_in_notebook
from mpxla.user_lines import at_script_line


def caught(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def configure_wrongly():
    from mpxla.config import Config

    Config(pipeline_parallel_degree=0)


def break_json():
    import json

    json.loads("{")


@pytest.mark.unit
def test_an_answer_of_mpxla_shows_the_users_frames_alone():
    text = format_error(caught(configure_wrongly))
    assert "Config(pipeline_parallel_degree=0)" in text and "mpxla/config.py" not in text
    assert text.endswith("pipeline_parallel_degree: 0 must be an integer >= 1\n")
    assert "mpxla/config.py" in format_error(caught(configure_wrongly), is_complete=True)


def assign_absent():
    torch.nn.Parameter(torch.ones(2)).data = torch.empty(2, device="meta")


@pytest.mark.unit
def test_an_assignment_of_an_absent_parameter_says_what_to_do():
    assert "Skip parameters whose device is meta" in format_error(caught(assign_absent))


def use_absent_gradient():
    return torch.nn.Parameter(torch.ones(2)).grad.norm()


def multiply_by_absent_gradient():
    parameter = torch.nn.Parameter(torch.ones(2))
    return parameter * parameter.grad


def multiply_by_none():
    return torch.ones(2) * None


@pytest.mark.unit
def test_a_gradient_of_another_rank_says_what_to_do():
    for use in (use_absent_gradient, multiply_by_absent_gradient):
        assert "loop over model.local_parameters()" in format_error(caught(use))
    assert "local_parameters" not in format_error(caught(multiply_by_none))


def misname():
    smp.no_such_name  # noqa: B018


@pytest.mark.unit
def test_so_does_another_error_that_mpxla_raises_on_purpose():
    assert "mpxla/__init__.py" not in format_error(caught(misname))


@pytest.mark.unit
def test_other_errors_keep_their_frames_and_causes():
    def explain():
        try:
            break_json()
        except ValueError as error:
            raise ConfigError("bad") from error

    text = format_error(caught(break_json))
    assert "in break_json" in text and "json/decoder.py" in text
    text = format_error(caught(explain))
    assert "in break_json" in text and "json/decoder.py" in text and "in explain" in text


@pytest.mark.unit
def test_a_capture_error_shows_the_way_to_the_users_line_and_nothing_of_torch():
    def model():
        break_json()

    def capture():
        try:
            model()
        except ValueError as error:
            raise smp.CaptureError("The step function at f.py:1 cannot be captured.") from error

    text = format_error(caught(capture))
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert [line for line in lines if set(line) - set("~^")][-3:] == [  # marks of Python 3.13
        "model()",
        "break_json()",
        'json.loads("{")',
    ]
    assert "decoder.py" not in text and "direct cause" not in text
    assert text.endswith(
        "\nmpxla.errors.CaptureError: The step function at f.py:1 cannot be captured.\n"
    )
    complete = format_error(caught(capture), is_complete=True)
    assert "decoder.py" in complete and "direct cause" in complete


@pytest.mark.unit
def test_what_lies_between_the_users_frames_is_left_out():
    """As a capture does, whose frames are hundreds."""

    def sort():
        sorted([1, 2], key=functools.partial(call, break_json))

    def call(function, _):
        contextlib.ExitStack().enter_context(suppressed(function))

    text = format_error(caught(sort))
    names = [name for name in ("sort", "call", "suppressed", "break_json") if f"in {name}" in text]
    assert names == ["sort", "call", "suppressed", "break_json"]
    assert "contextlib.py" not in text and "json/decoder.py" in text


@contextlib.contextmanager
def suppressed(function):
    yield function()


def show(error, claims, **settings):
    shown = UncaughtErrors(**settings)
    shown.claim = None if claims is None else lambda name: claims.setdefault(name, shown.rank)
    shown(type(error), error, error.__traceback__)


@pytest.mark.unit
def test_a_notebook_shows_errors_of_mpxla_alike(capsys, monkeypatch):
    handlers = []
    shell = SimpleNamespace(
        custom_exceptions=(), set_custom_exc=lambda *given: handlers.append(given)
    )
    show_in_notebook(UncaughtErrors())  # IPython is not there
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    show_in_notebook(UncaughtErrors())
    ((kinds, handler),) = handlers
    assert kinds == (MpxlaError,)
    error = caught(configure_wrongly)
    assert handler(shell, type(error), error, error.__traceback__, tb_offset=None) is None
    assert capsys.readouterr().err == format_error(error)
    shell.custom_exceptions = (KeyError,)  # the user's own
    show_in_notebook(UncaughtErrors())
    assert len(handlers) == 1


@pytest.mark.unit
def test_one_rank_shows_an_error_in_full(capsys):
    error, claims = caught(configure_wrongly), {}
    show(error, claims, rank=1, world_size=2)
    show(error, claims, rank=0, world_size=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank1]: Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("[rank0]")] == [lines[-1]]
    assert "[rank0]: ConfigError at " in lines[-1] and "test_uncaught.py:" in lines[-1]
    assert lines[-1].endswith("a problem: (rank 1 shows its error in full)")
    for settings in ({"is_complete": True, "rank": 0, "world_size": 2}, {}):
        show(error, claims, **settings)
        assert "Traceback" in capsys.readouterr().err
    show(error, None, rank=1, world_size=2)
    assert "Traceback" in capsys.readouterr().err, "nobody can be asked"


@pytest.mark.unit
def test_a_place_that_the_text_begins_with_is_said_once(capsys):
    def refuse():
        raise ConfigError(f"{at_script_line()}: no")

    error, claims = caught(refuse), {}
    for rank in (1, 0):
        show(error, claims, rank=rank, world_size=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.count("test_uncaught.py:") == 1 and last.startswith("[rank0]: ConfigError: /")


@pytest.mark.unit
def test_what_follows_from_another_ranks_error_is_one_line(capsys):
    failure = PeerFailure("rank 1 raised ValueError in the training script: bad")
    failure.raised_by = 1
    show(failure, {}, rank=0, world_size=2)
    assert capsys.readouterr().err == (
        f"[rank0]: PeerFailure: {failure} (rank 1 shows its error in full)\n"
    )
    failure.raised_by, claims = None, {}  # its process was killed
    for rank in (0, 2):
        show(failure, claims, rank=rank, world_size=3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].endswith("(rank 0 shows its error in full)")


def raise_together():
    """What the process wrote when an error ended the script on both ranks."""
    import io

    hook = sys.excepthook = sys.__excepthook__  # an earlier test may have left torch's
    smp.init({"pipeline_parallel_degree": 2})
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        error = caught(configure_wrongly)
        shown = show_uncaught(smp.session.current().env)
        assert shown is None, "the session's hook tells the others as well"
        previous = [c.cell_contents for c in sys.excepthook.__closure__]
        (shown,) = [p for p in previous if isinstance(p, UncaughtErrors)]
        shown(type(error), error, error.__traceback__)
        text = sys.stderr.getvalue()
    finally:
        sys.stderr = before
    smp.barrier()
    smp.shutdown()
    assert sys.excepthook is hook
    return text


@pytest.mark.ranks
def test_ranks_agree_on_who_shows_an_error():
    texts = run_ranks(raise_together, 2)
    assert sorted("Traceback" in text for text in texts) == [False, True]


def write_meanwhile():
    """Lines on standard output while gloo connects."""
    with without_gloos_lines():
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\nmine\n")
        print("printed", flush=True)
        with without_gloos_lines():
            os.write(1, b"nested\n")
    os.write(1, b"after\n")


@pytest.mark.unit
def test_only_gloos_lines_are_dropped(capfd):
    write_meanwhile()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines[:-1]) == ["mine", "nested", "printed"] and lines[-1] == "after"
