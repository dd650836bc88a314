import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mpxla.tests.backends import name_here
from mpxla.tests.ranks.launcher import xla_flags_of_ranks
from mpxla.tests.ranks.run import RankError, run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks


@dataclass
class Point:
    x: int


def describe_rank():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return [os.environ[name] for name in names]


def process_id():
    return os.getpid()


def environment(name):
    return os.environ.get(name)


def set_environment(name):
    os.environ[name] = "1"


def rendezvous():
    return os.environ["MPXLA_RENDEZVOUS_FILE"], int(os.environ["MASTER_PORT"])


def move(point, tensor):
    rank = int(os.environ["RANK"])
    return Point(point.x + rank), torch.nn.Parameter(tensor + rank)


def draw():
    return torch.rand(3)


def fail_on(rank, exception):
    print("before the failure")
    print("on the error stream", file=sys.stderr)
    if int(os.environ["RANK"]) == rank:
        raise exception
    time.sleep(1000)


def kill_self(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def exit_with(codes):
    sys.exit(codes[int(os.environ["RANK"])])


def sleep_here(rank):
    if int(os.environ["RANK"]) == rank:
        time.sleep(1000)


def return_lambda():
    return {"f": lambda: 0}


def raise_and_follow():
    from mpxla.errors import PeerFailure

    if int(os.environ["RANK"]) == 0:
        raise PeerFailure("rank 1 raised ValueError: bad")
    time.sleep(0.5)
    raise ValueError("bad")


def leave_child_behind():
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    return child


def print_and_return():
    print("out", flush=True)
    print("err", file=sys.stderr, flush=True)
    return int(os.environ["RANK"])


def recall_together(folder):
    from mpxla.kept import open_kept

    made = []

    def make():
        time.sleep(0.3)
        made.append(1)
        return 3

    value = open_kept(folder, "cpu").recall("ab", make, lambda value: b"%d" % value, int)
    return value, len(made)


def test_one_rank_makes_what_all_would_keep(tmp_path):
    (value, num_made), (other, num_others) = run_ranks(recall_together, 2, str(tmp_path))
    assert value == other == 3
    assert num_made + num_others == 1


def test_environment_is_that_of_a_launcher():
    assert run_ranks(describe_rank, 2) == [
        ["0", "2", "0", "2", "127.0.0.1"],
        ["1", "2", "1", "2", "127.0.0.1"],
    ]


def test_xla_optimizes_nothing_in_tests_unless_told_to():
    for flags in run_ranks(environment, 2, "XLA_FLAGS"):
        assert "--xla_backend_optimization_level=" in flags
        assert ("level=0" in flags) == ("--xla_cpu_use_fusion_emitters=false" in flags)


@pytest.mark.parametrize("flags", ["", "--xla_backend_optimization_level=3"])
def test_ranks_compile_as_in_real_use_where_xla_optimizes(flags):
    assert xla_flags_of_ranks(flags) == flags


def test_processes_are_kept_between_calls():
    first = run_ranks(process_id, 2)
    assert run_ranks(process_id, 2) == first
    assert os.getpid() not in first


def test_every_call_has_its_own_rendezvous():
    first, second = run_ranks(rendezvous, 2), run_ranks(rendezvous, 2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][0] != second[0][0]


def test_what_a_function_sets_in_the_environment_is_gone_in_the_next_call():
    run_ranks(set_environment, 2, "MPXLA_TEST_LEAK")
    assert run_ranks(environment, 2, "MPXLA_TEST_LEAK") == [None, None]


def test_random_numbers_are_the_same_in_every_call():
    first, second = run_ranks(draw, 2), run_ranks(draw, 2)
    assert torch.equal(first[0], second[0])


def test_arguments_and_results_may_be_of_the_test_module_and_tensors():
    results = run_ranks(move, 2, Point(5), torch.ones(2, 2).T)
    assert [point.x for point, _ in results] == [5, 6]
    assert type(results[0][0]) is Point
    assert all(type(tensor) is torch.nn.Parameter for _, tensor in results)
    assert torch.equal(results[1][1], torch.full((2, 2), 2.0))


@pytest.mark.slow
def test_given_environment_is_there_in_processes_of_its_own():
    usual = run_ranks(process_id, 2)
    env = {"MPXLA_TEST_VALUE": "7"}
    assert run_ranks(environment, 2, "MPXLA_TEST_VALUE", env=env) == ["7", "7"]
    assert not set(run_ranks(process_id, 2, env=env)) & set(usual)
    assert run_ranks(environment, 2, "MPXLA_TEST_VALUE") == [None, None]


def test_who_names_the_usual_backend_gets_the_usual_processes():
    usual = run_ranks(process_id, 2)
    assert run_ranks(process_id, 2, env={"MPXLA_DEVICE": name_here()}) == usual
    assert not set(run_ranks(process_id, 2, env={"MPXLA_DEVICE": "eager"})) & set(usual)


@pytest.mark.slow
def test_first_failing_rank_is_named_and_all_output_is_shown():
    before = run_ranks(process_id, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 2, 1, KeyError("lost"))
    assert time.monotonic() - start < 55, "before the time of the call was up"
    lines = str(caught.value).splitlines()
    assert lines[0] == "fail_on failed on rank 1 of 2: KeyError: 'lost'"
    assert lines[1] == "  rank 0: had not returned (stacks below)"
    assert lines[2] == "  rank 1: KeyError: 'lost'"
    assert lines.count("before the failure") == 2
    assert lines.count("on the error stream") == 2
    assert any("in fail_on" in line and "test_run.py" in line for line in lines)
    assert not set(before) & set(run_ranks(process_id, 2)), "the failed processes were used again"
    assert not any(_is_alive(pid) for pid in before)


def test_cause_is_named_even_if_a_consequence_came_first():
    with pytest.raises(RankError, match="failed on rank 1 of 2: ValueError: bad") as caught:
        run_ranks(raise_and_follow, 2)
    assert "  rank 0: PeerFailure: rank 1 raised ValueError: bad" in str(caught.value)


@pytest.mark.slow
def test_timeout_shows_stacks():
    with pytest.raises(RankError, match="sleep_here timed out after 4 s on rank 1 of 2") as caught:
        run_ranks(sleep_here, 2, 1, timeout_s=4)
    text = str(caught.value)
    assert "  rank 0: returned" in text
    assert "in sleep_here" in text


def test_killed_and_exiting_ranks_are_failures():
    with pytest.raises(RankError, match=r"rank 0 of 2: was killed by signal 9"):
        run_ranks(kill_self, 2, 0)
    with pytest.raises(RankError, match=r"SystemExit: 3"):
        run_ranks(exit_with, 2, [0, 3])


def crash_in_thread(num_others):
    def crash():
        print("why it crashed", file=sys.stderr, flush=True)
        os.abort()

    threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(num_others)]
    threads.insert(num_others // 2, threading.Thread(target=crash))
    for thread in threads:
        thread.daemon = True
    for thread in threads:
        thread.start()
    time.sleep(60)


@pytest.mark.parametrize("num_others", [pytest.param(0, marks=pytest.mark.slow), 60])
def test_crash_is_shown_with_its_thread_among_many(num_others):
    with pytest.raises(RankError, match=r"was killed by signal 6") as caught:
        run_ranks(crash_in_thread, 1, num_others)
    text = str(caught.value)
    assert "why it crashed" in text
    assert "Fatal Python error: Aborted" in text
    assert re.search(r"Current thread .*\n.* in crash\n", text)


def test_result_that_cannot_be_sent_back_is_named():
    with pytest.raises(RankError, match=r"return_lambda: obj\['f'\].*cannot be pickled"):
        run_ranks(return_lambda, 2)


@pytest.mark.parametrize("run", [run_ranks, run_ranks_unpooled])
def test_only_functions_of_a_top_level_are_taken(run):
    with pytest.raises(TypeError, match="top level of a module"):
        run(lambda: 0, 2)
    with pytest.raises(TypeError, match="top level of a module"):
        run(os.getpid, 2)


def test_unpooled_processes_end_by_themselves():
    results = run_ranks_unpooled(print_and_return, 2)
    assert [result.exit_code for result in results] == [0, 0]
    assert [result.value for result in results] == [0, 1]
    assert results[1].stdout == "out\n"
    assert results[1].stderr == "err\n"
    assert all(0 <= result.duration_s < 55 for result in results)


def test_unpooled_reports_signals_exit_codes_and_tracebacks():
    killed = run_ranks_unpooled(kill_self, 2, 1)
    assert [result.exit_code for result in killed] == [0, -signal.SIGKILL]
    assert [result.value for result in killed] == ["alive", None]
    exited = run_ranks_unpooled(exit_with, 2, [0, 3])
    assert [result.exit_code for result in exited] == [0, 3]


@pytest.mark.parametrize(
    "env", [{}, pytest.param({"MPXLA_TEST_VALUE": "7"}, marks=pytest.mark.slow)]
)
def test_children_of_ranks_end_with_them(env):
    children = [result.value for result in run_ranks_unpooled(leave_child_behind, 2, env=env)]
    assert len(set(children)) == 2
    _await(lambda: not any(_is_alive(pid) for pid in children), 60)


def test_unpooled_late_process_is_an_error_with_stacks():
    with pytest.raises(RankError, match="timed out after 2 s on rank 0 of 1") as caught:
        run_ranks_unpooled(sleep_here, 1, 0, timeout_s=2)
    assert "in sleep_here" in str(caught.value)


_SCRIPT = """
import os, time
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.ranks.test_run import call

def double(x):
    return 2 * x

def announce():
    print("never", flush=True)
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(1000)

if __name__ == "__main__":
    print(run_ranks(double, 2, 4), run_ranks(call, 2, double, 5), flush=True)
    run_ranks(announce, 2)
"""


def call(function, *args):
    return function(*args)


@pytest.mark.slow
def test_functions_of_a_script_can_be_called_and_passed_and_ranks_die_with_it(tmp_path):
    """One script for both, since it imports torch first, which takes long."""
    script, pids, errors = (tmp_path / name for name in ("script.py", "pids", "errors"))
    script.write_text(_SCRIPT.format(path=str(pids)))
    pids.touch()
    with errors.open("w") as file:
        parent = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert parent.stdout.readline() == "[8, 8] [10, 10]\n", errors.read_text()
    _await(lambda: len(pids.read_text().splitlines()) == 2, 60)
    parent.kill()
    assert parent.communicate()[0] == "", "ranks write to files"
    ranks = [int(line) for line in pids.read_text().splitlines()]
    _await(lambda: not any(_is_alive(pid) for pid in ranks), 60)


def _await(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
