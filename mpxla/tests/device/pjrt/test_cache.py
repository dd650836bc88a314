"""Programs on disk: what is found again, and what is another program."""

import os
import subprocess
import sys

import pytest
import torch

from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.kept import Kept, open_kept
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec

SPECS = [TensorSpec((8,), torch.float32)]


@pytest.fixture
def backend():
    return PjrtBackend("cpu")


def loaded(backend, folder, factor):
    """How many programs are found on disk while one is compiled; it must compute right."""
    kept = open_kept(str(folder), backend.machine)
    backend.keep_programs(kept)  # a program of its own for every factor
    program = compile_function(backend, "scaled", lambda x: [x * factor + 0.25], SPECS)
    (found,) = program(backend.put([torch.ones(8)]))
    assert torch.equal(backend.view(found), torch.full((8,), factor + 0.25))
    return kept.num_found


def programs(folder):
    return sorted(folder.glob("cpu-*/*.kept"))


def test_a_program_is_found_again(backend, tmp_path):
    assert loaded(backend, tmp_path / "new", 3.0) == 0
    assert len(programs(tmp_path / "new")) == 1
    assert loaded(backend, tmp_path / "new", 3.0) == 1
    assert loaded(backend, tmp_path / "new", 5.0) == 0
    assert loaded(backend, tmp_path / "other", 3.0) == 0
    assert loaded(backend, "", 3.0) == 0


def test_other_flags_and_threads_of_xla_are_other_programs(backend, tmp_path, monkeypatch):
    loaded(backend, tmp_path, 3.0)
    for name, value in {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " ", "NPROC": "61"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert loaded(backend, tmp_path, 3.0) == 0
    assert loaded(backend, tmp_path, 3.0) == 1


def test_donated_arguments_are_other_programs(backend, tmp_path):
    kept = open_kept(str(tmp_path), backend.machine)
    backend.keep_programs(kept)
    for donated, found in (((), 0), ((0,), 0), ((), 1), ((0,), 2)):
        program = compile_function(backend, "sum", lambda x: [x + 1], SPECS, donated=donated)
        (argument,) = backend.zeros(SPECS)
        program([argument])
        assert argument.is_deleted() == bool(donated)
        assert kept.num_found == found


def test_programs_of_zeros_are_found(tmp_path):
    def found():
        backend = PjrtBackend("cpu")
        kept = open_kept(str(tmp_path), backend.machine)
        backend.keep_programs(kept)
        assert not any(backend.view(array).any() for array in backend.zeros(SPECS))
        return kept.num_found

    assert (found(), found()) == (0, 1)


def test_random_programs_draw_the_same_when_loaded(backend, tmp_path):
    def drawn():
        backend.keep_programs(open_kept(str(tmp_path), backend.machine))
        program = compile_function(backend, "noise", lambda x: [torch.rand_like(x)], SPECS)
        (seed,) = backend.put([torch.tensor(17)])
        return backend.view(program(backend.zeros(SPECS), seed)[0]).clone()

    assert torch.equal(drawn(), drawn())


def factored(folder, name):
    """Factors a matrix. Returns its first number, and how many programs are found on disk."""
    backend = PjrtBackend("cpu")
    kept = open_kept(folder, backend.machine)
    backend.keep_programs(kept)
    functions = {
        "cholesky": torch.linalg.cholesky,
        "triangular": lambda x: torch.linalg.solve_triangular(x, 4 * x.mT, upper=True),
    }
    specs = [TensorSpec((3, 3), torch.float32)]
    program = compile_function(backend, name, lambda x: [functions[name](x)], specs)
    (found,) = program(backend.put([torch.eye(3) * 4]))
    return backend.view(found)[0, 0].item(), kept.num_found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("cholesky", 2.0), ("triangular", 4.0)])
def test_programs_of_linear_algebra_run_where_none_was_traced(tmp_path, name, number):
    assert factored(str(tmp_path), name) == (number, 0)
    code = f"from {__name__} import factored; print(factored({str(tmp_path)!r}, {name!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == str((number, 1)), ran.stderr


def test_a_program_that_cannot_be_loaded_is_compiled_anew(backend, tmp_path, caplog, monkeypatch):
    loaded(backend, tmp_path, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "get", lambda kept, key: b"of another version")
        assert loaded(backend, tmp_path, 3.0) == 0
    assert "what an earlier start has kept cannot be read, and is made anew" in caplog.text
