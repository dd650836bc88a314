"""Programs on disk: a second start compiles nothing, and what cannot be used is said."""

import os

import jax
import pytest
import torch

from mpxla.device.pjrt import cache
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec
from mpxla.tests import parity
from mpxla.tests.device.pjrt.found import counted
from mpxla.tests.ranks.run import run_ranks_unpooled
from mpxla.tests.test_parity import case_of

SPECS = [TensorSpec((8,), torch.float32)]


@pytest.fixture
def backend(monkeypatch):
    """With jax's cache, which other tests do without; afterwards as they are."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    backend = PjrtBackend("cpu")
    yield backend
    backend.keep_programs("")
    jax.config.update("jax_enable_compilation_cache", before)


def loaded(backend, factor):
    """How many programs are found on disk while one is compiled; it must compute right."""
    with counted() as counts:  # a program of its own for every factor
        program = compile_function(backend, "scaled", lambda x: [x * factor + 0.25], SPECS)
    (found,) = program(backend.put([torch.ones(8)]))
    assert torch.equal(backend.view(found), torch.full((8,), factor + 0.25))
    return counts["hits"]


def programs(folder):
    return sorted(folder.glob("cpu-*/*-cache"))


def test_a_program_is_found_again(backend, tmp_path):
    assert backend.keep_programs(str(tmp_path / "new"))
    assert loaded(backend, 3.0) == 0
    assert len(programs(tmp_path / "new")) == 1
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert loaded(backend, 3.0) == 1
    assert loaded(backend, 5.0) == 0
    assert backend.keep_programs(str(tmp_path / "other")), "may be changed"
    assert loaded(backend, 3.0) == 0
    assert not backend.keep_programs("")
    assert loaded(backend, 3.0) == 0


def test_what_was_half_written_goes(backend, tmp_path):
    backend.keep_programs(str(tmp_path))
    loaded(backend, 3.0)
    (program,) = programs(tmp_path)
    program.write_bytes(program.read_bytes()[:100])
    program.with_name(program.name.replace("-cache", "-atime")).unlink()
    assert backend.keep_programs(str(tmp_path))
    assert programs(tmp_path) == []
    assert loaded(backend, 3.0) == 0 and loaded(backend, 3.0) == 1


def test_the_folder_does_not_grow_without_end(backend, tmp_path, monkeypatch):
    backend.keep_programs(str(tmp_path))
    loaded(backend, 2.0)
    (program,) = programs(tmp_path)
    monkeypatch.setattr(cache, "MAX_BYTES", 5 * program.stat().st_size // 2)
    backend.keep_programs(str(tmp_path))
    for factor in (3.0, 4.0, 5.0):
        loaded(backend, factor)
    assert len(programs(tmp_path)) == 2
    assert loaded(backend, 5.0) == 1 and loaded(backend, 2.0) == 0, "the oldest goes first"


def test_a_folder_that_cannot_be_made_is_said(backend, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert not backend.keep_programs(str(tmp_path / "file"))
    assert "compiled programs are not kept" in caplog.text
    assert "Set compile_cache to a folder that can be written" in caplog.text
    assert loaded(backend, 3.0) == 0


# --- whole jobs ---------------------------------------------------------------------------------

CASE = case_of("mlp", "2x2I")


def start_job(folder):
    """Losses, programs that are compiled, and those that are found."""
    os.environ["XDG_CACHE_HOME"] = folder
    jax.config.update("jax_enable_compilation_cache", True)
    with counted() as counts:
        observed = parity.train(CASE)
    return observed.adam_losses, observed.state, counts["misses"], counts["hits"]


@pytest.mark.ranks
def test_a_second_start_compiles_nothing(tmp_path):
    env = {"MPXLA_DEVICE": "pjrt"}
    starts = [run_ranks_unpooled(start_job, 2, str(tmp_path), env=env) for _ in range(2)]
    for rank in (rank for ranks in starts for rank in ranks):
        assert rank.exit_code == 0, rank.stderr
    first, second = ([rank.value for rank in ranks] for ranks in starts)
    assert programs(tmp_path / "mpxla" / "programs")
    for before, after in zip(first, second, strict=True):
        assert before[2] > 0 and after[2] == 0
        assert after[3] == before[2] + before[3]
        assert after[0] == before[0], "loaded programs are the same programs"
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
