"""`python -m mpxla schedule`: grids, lists, drawings and refusals."""

import builtins
import json
import re
import textwrap
from pathlib import Path

import pytest

from mpxla.cli.main import main
from mpxla.schedule.action import parse_schedule

pytestmark = pytest.mark.unit


def output(capsys, *words):
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def refusal(capsys, *words):
    assert main(["schedule", *words]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_grid(capsys):
    text = output(capsys, "--stages", "2", "--microbatches", "2", "--pipeline", "zero_bubble")
    assert text.splitlines() == [
        "rank 0  0F0  0F1  .    0I0  0W0  0I1  0W1",
        "rank 1  .    1F0  1I0  1F1  1I1  1W0  1W1",
        "makespan 7, bubble 14.3 %, microbatches in flight per stage: 2 2",
    ]


def test_actions_can_be_read_back(capsys, tmp_path):
    words = ("--stages", "2", "--microbatches", "4", "--virtual", "2")
    text = output(capsys, *words, "--actions")
    assert len(parse_schedule(text)) == 2 and "3RECV_F0<2" in text
    file = tmp_path / "own.txt"
    file.write_text(text)
    typed = output(capsys, "--stages", "2", "--microbatches", "4", "--schedule-file", str(file))
    assert typed == output(capsys, *words)


def test_chrome_trace(capsys, tmp_path):
    file = tmp_path / "schedule.json"
    output(capsys, "--stages", "2", "--microbatches", "2", "--output", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert {"0F0", "1B1"} <= {event["name"] for event in events}


def test_png(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    file = tmp_path / "schedule.png"
    assert "bubble 11.1 %" in output(
        capsys, "--stages", "2", "--microbatches", "8", "--output", str(file)
    )
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_without_matplotlib(capsys, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = refusal(capsys, "--output", str(tmp_path / "x.png"))
    assert "needs matplotlib, which is not installed. Install it with pip install" in text
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "x.gif"), "x.gif: drawings are written as .png (picture) or .json"),
        (("--stages", "0"), "pipeline_parallel_degree: 0 must be an integer >= 1"),
        (
            ("--pipeline", "zero_bubble_v", "--virtual", "3"),
            "virtual_pipeline_degree: 3 does not go with pipeline: 'zero_bubble_v'",
        ),
        (("--pipeline", "custom"), "needs the key schedule"),
    ],
)
def test_refusals(capsys, words, message):
    text = refusal(capsys, *words)
    assert text.startswith("error: ") and message in text


def test_a_typed_schedule_that_deadlocks_shows_the_grid(capsys, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n")
    words = ("--stages", "2", "--microbatches", "2", "--schedule-file", str(file))
    text = refusal(capsys, *words)
    assert ">>0B0<<" in text and "rank 1 is blocked at step 0" in text


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    command, shown = re.search(
        r"    \$ python -m mpxla schedule (.*)\n((?:    .*\n)+)", page
    ).groups()
    assert output(capsys, *command.split()) == textwrap.dedent(shown)
