"""What counts as progress of a process, by counters of this very process and of made-up ones."""

import os
import subprocess
import sys
import threading
import time

import pytest

from mpxla.comm.vitals import LEAST_BYTES_PER_S, LEAST_CPU_SHARE, Vitals

pytestmark = pytest.mark.unit


class Kernel:
    """Counters of a process with one child, as files."""

    def __init__(self, folder):
        self._folder = folder
        for task in ("self/task/1", "self/task/2", "77/task/77"):
            (folder / task).mkdir(parents=True)
        (folder / "self/task/1/children").write_text("77 ")
        self.set()

    def set(self, thread_s=0.0, child_s=0.0, read=0, mapped=0, child_wrote=0):
        (self._folder / "self/task/1/schedstat").write_text("500 1 1\n")
        (self._folder / "self/task/2/schedstat").write_text(f"{int(thread_s * 1e9)} 1 1\n")
        ticks = round(child_s * os.sysconf("SC_CLK_TCK"))
        (self._folder / "77/stat").write_text(f"77 (a ) b) S{' 0' * 10} {ticks} 0 0 0\n")
        (self._folder / "self/io").write_text(f"rchar: {read}\nsyscr: 9\nread_bytes: {mapped}\n")
        (self._folder / "77/io").write_text(f"wchar: {child_wrote}\n")


@pytest.mark.parametrize(
    ("used", "moves"),
    [
        ({}, False),
        ({"thread_s": 2 * LEAST_CPU_SHARE}, True),
        ({"thread_s": LEAST_CPU_SHARE / 2}, False),
        ({"child_s": 2 * LEAST_CPU_SHARE}, True),
        ({"read": 2 * LEAST_BYTES_PER_S}, True),
        ({"read": LEAST_BYTES_PER_S / 2}, False),
        ({"mapped": 2 * LEAST_BYTES_PER_S}, True),
        ({"child_wrote": 2 * LEAST_BYTES_PER_S}, True),
    ],
)
def test_rates_decide(tmp_path, monkeypatch, used, moves):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kernel, vitals = Kernel(tmp_path), Vitals(tmp_path)
    assert not vitals.sample(), "there is nothing to compare with"
    now[0] += 10
    kernel.set(**{name: int(10 * n) if n > 1 else 10 * n for name, n in used.items()})
    assert vitals.sample() is moves
    now[0] += 10
    assert not vitals.sample(), "that was before"
    kernel.set(thread_s=1000)
    vitals.forget()
    assert not vitals.sample()


def test_without_proc_the_processor_time_of_the_process_counts(tmp_path):
    vitals = Vitals(tmp_path / "none")
    vitals.sample()
    _compute(0.3)
    assert vitals.sample()


def _compute(seconds):
    """Of processor time, on however busy a machine."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


CHILD = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(600)"


def test_real_counters(tmp_path):
    """Sleeping is none, whatever other threads of pytest do; computing and writing are."""
    vitals = Vitals()
    vitals.sample()
    time.sleep(1.0)
    assert not vitals.sample()
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: (_compute(0.3), waiting.wait()))
    thread.start()
    while time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) < 0.3:
        time.sleep(0.01)
    assert vitals.sample()
    waiting.set()
    thread.join()
    vitals.sample()
    (tmp_path / "file").write_bytes(bytes(10_000_000))
    assert vitals.sample()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        vitals.sample()
        child.stdout.readline()
        assert vitals.sample()
        child.kill()
