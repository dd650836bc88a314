"""`python -m mpxla plan`: a model's partition, programs and predicted steps, without devices."""

import contextlib
import io
import re
from types import SimpleNamespace

import pytest

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks  # torch_xla is loaded, in another process


def plan_here(*words):
    from mpxla.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exit_code = main(["plan", *words])
    return {"exit_code": exit_code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def plan(*words):
    """In a process that has imported torch, and may have planned, already."""
    (found,) = run_ranks(plan_here, 1, *words, timeout_s=400)
    return SimpleNamespace(**found)


@pytest.mark.slow
def test_plan_with_a_search(tmp_path):
    file = tmp_path / "plan.json"
    done = plan(
        "mpxla.tests.cli.factories:chain_with_loss",
        *("--stages", "2", "--microbatches", "4", "--search", "--output", str(file)),
    )
    assert done.exit_code == 0, done.stderr
    text = done.stdout
    assert "Partition assignments:" in text and "FLOPs" in text
    best = re.search(r"Best of \d+ schedules:\n.*\n +([\d.]+) +([\d.]+) ", text)
    predicted = re.search(r"Predicted step: ([\d.]+) ms, bubble ([\d.]+) %", text)
    assert best.groups() == predicted.groups(), "the best is planned"
    rows = re.findall(r"^ +(\d) +([\d.]+ \w+) +([\d.]+ \w+) +([\d.]+ \w+)$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    assert "stage 0 forward" in text and "link 0 -> 1: " in text
    assert file.stat().st_size > 1000


@pytest.mark.slow
def test_ranks_are_divided_between_stages_and_tensors():
    factory = "mpxla.tests.cli.factories:pairs"
    done = plan(factory, "--devices", "4", "--microbatches", "2", "--search")
    assert done.exit_code == 0, done.stderr
    title, table = "Layouts, each with its best schedule:", done.stdout.split("\n\n")[0]
    assert table.startswith(title)
    rows = re.findall(r"^ +([\d.e+-]+) +[\d.]+ \w+ +(\d x \d)$", table, re.MULTILINE)
    assert {layout for _, layout in rows} == {"4 x 1", "2 x 2", "1 x 4"}
    steps = [float(step) for step, _ in rows]
    assert steps == sorted(steps)
    predicted = re.search(r"Predicted step: ([\d.]+) ms", done.stdout)
    assert float(predicted.group(1)) == steps[0], "the best is planned"
    done = plan("mpxla.tests.cli.factories:chain_with_loss", "--devices", "2")
    assert done.exit_code == 1
    assert "--devices with a factory needs --search" in done.stderr


@pytest.mark.slow
def test_what_is_given_beside_the_number_of_ranks_is_kept():
    factory, search = "mpxla.tests.cli.factories:pairs", ("--microbatches", "2", "--search")
    done = plan(factory, "--devices", "4", "--tp", "2", *search)
    assert done.exit_code == 0 and "Layouts" not in done.stdout, "one layout is left"
    assert "2 stages" in done.stdout or "stage 1" in done.stdout
    assert "link 1 -> 0" in done.stdout and "link 1 -> 2" not in done.stdout, "two pipeline ranks"
    done = plan(factory, "--devices", "4", "--tp", "2", "--stages", "3", *search)
    assert done.exit_code == 1
    assert "--devices 4 cannot be divided so with --stages 3 and --tp 2" in done.stderr
    done = plan(factory, "--stages", "0", "--microbatches", "2")
    assert done.exit_code == 1
    assert "pipeline_parallel_degree: 0 must be an integer >= 1" in done.stderr


@pytest.mark.slow
def test_plan_of_a_step_function_under_a_limit():
    done = plan(
        "mpxla.tests.cli.factories:chain_with_loss",
        *("--stages", "2", "--microbatches", "4", "--memory-limit", "0.000001"),
    )
    assert done.exit_code == 1
    assert re.search(r"error: No schedule fits into 1073 bytes per rank: the least, ", done.stderr)


@pytest.mark.slow
def test_plan_of_divided_parameters():
    words = ("mpxla.tests.cli.factories:gpt", "--stages", "2", "--microbatches", "4", "--sdp", "4")
    done = plan(*words, "--memory-limit", "8")
    assert done.exit_code == 0, done.stderr
    sizes = dict(re.findall(r"sdp_gather: (\w+) +([\d.]+) \w+iB", done.stdout))
    assert set(sizes) == {"microbatch", "step"}
    assert "Within 8 GiB per rank, parameters are gathered once a step." in done.stdout
    done = plan(*words, "--memory-limit", "0.000001")
    assert done.exit_code == 1
    assert re.search(r"divided over 4 replicas, a rank needs .* GiB, more than", done.stderr)


def test_more_stages_than_operations():
    done = plan("mpxla.tests.cli.factories:chain_with_loss", "--stages", "40")
    assert done.exit_code == 1
    assert "error: Cannot cut the step into 40 stages: at most" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "'nothing' names no factory. Write module:function"),
        ("no_such_module:f", "the module no_such_module of 'no_such_module:f' cannot be imported"),
        ("mpxla.tests.cli.factories:absent", "has no function 'absent'"),
        ("mpxla.tests.cli.factories:NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
        ("mpxla.tests.cli.factories:wrong", "a factory returns a tuple of model, example inputs"),
    ],
)
def test_factories_that_are_none(name, message):
    from mpxla.cli.factory import load_factory
    from mpxla.errors import MpxlaError

    with pytest.raises(MpxlaError, match=re.escape(message)):
        load_factory(name)


def together(done):
    """KiB of memory of every rank."""
    assert done.exit_code == 0, done.stderr
    rows = re.findall(r"^ +\d +[\d.]+ KiB +[\d.]+ \w+ +([\d.]+) KiB$", done.stdout, re.MULTILINE)
    return [float(size) for size in rows]


@pytest.mark.slow
def test_under_a_limit_a_search_computes_again_what_does_not_fit():
    words = ("mpxla.tests.cli.factories:widening_chain", "--stages", "2", "--microbatches", "4")
    least = max(together(plan(*words, "--activation-memory", "recompute")))
    assert least < 0.7 * max(together(plan(*words)))
    limit = least + 2.0
    done = plan(*words, "--memory-limit", str(limit / 2**20))
    assert re.search(r"KiB +[\d.]+ KiB +[\d.]+ KiB +0\.[28] +\w+, ", done.stdout), "bytes are kept"
    assert len(together(done)) == 2 and max(together(done)) <= limit
