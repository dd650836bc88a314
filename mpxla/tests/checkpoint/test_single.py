"""`smp.save` and `smp.load`."""

import os
import pickle
import re
from fractions import Fraction

import pytest
import torch

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def error_of(action):
    try:
        action()
    except smp.CheckpointError as error:
        return str(error)
    return None


def save_and_load(folder):
    smp.init({"pipeline_parallel_degree": 2})
    rank = smp.rank()
    smp.save({"rank": rank, "w": torch.full((3,), float(rank))}, f"{folder}/part.pt", partial=True)
    smp.save([rank], f"{folder}/every", v3=True)
    if rank == 0:
        smp.save({"all": 1}, f"{folder}/full.pt", partial=False)
        smp.save({"rank": 0}, f"{folder}/default")
        smp.save(Fraction(1, 2), f"{folder}/trusted", partial=False)
        smp.save({"n": 3}, f"{folder}/old_0_0")
        os.rename(f"{folder}/old_0_0_0", f"{folder}/old_0_0")
        torch.save({"n": torch.ones(2000)}, f"{folder}/cut")
        os.truncate(f"{folder}/cut", 3000)
    smp.barrier()
    loaded = {
        "part": smp.load(f"{folder}/part.pt"),
        "every": smp.load(f"{folder}/every"),
        "full": smp.load(f"{folder}/full.pt", partial=False),
        "trusted": smp.load(f"{folder}/trusted", partial=False, weights_only=False),
        "pickle": smp.load(
            f"{folder}/trusted", partial=False, weights_only=False, pickle_module=pickle
        ),
        "arguments": smp.load(f"{folder}/part.pt", pickle_load_args={"mmap": True}),
        "map": smp.load(f"{folder}/part.pt", map_location="meta")["w"].device.type,
    }
    if rank == 0:
        loaded["other name"] = smp.load(f"{folder}/old")
    errors = {
        "no file": error_of(lambda: smp.load(f"{folder}/nothing")),
        "no path": error_of(lambda: smp.save(1, 5)),
        "old": error_of(lambda: smp.load(f"{folder}/part.pt", back_compat=True)),
        "code": error_of(lambda: smp.load(f"{folder}/trusted", partial=False)),
        "module": error_of(lambda: smp.load(f"{folder}/part.pt", pickle_module=pickle)),
        "cut": error_of(lambda: smp.load(f"{folder}/cut", partial=False)),
    }
    return loaded, errors


ERRORS = {
    "no file": r"nothing_[01] does not exist; check the path and partial=True",
    "no path": r"smp\.save takes a path, not a int",
    "old": r"smp\.load\(back_compat=True\) reads optimizer files of SMP before 1\.10",
    "code": r"trusted holds objects whose loading could run code, .*fractions\.Fraction.*weights_o",
    "module": r"smp\.load\(pickle_module=\.\.\.\) can run code; pass weights_only=False",
    "cut": r"cut was truncated or altered",
}


def test_save_and_load(tmp_path):
    for rank, (loaded, errors) in enumerate(run_ranks(save_and_load, 2, str(tmp_path))):
        assert loaded["part"]["rank"] == rank
        assert loaded["part"]["w"].tolist() == [rank] * 3
        assert loaded["every"] == [rank]
        assert loaded["full"] == {"all": 1}
        assert loaded["trusted"] == loaded["pickle"] == Fraction(1, 2)
        assert loaded["map"] == "meta"
        assert loaded["arguments"]["w"].tolist() == [rank] * 3
        if rank == 0:
            assert loaded["other name"] == {"n": 3}
        assert set(errors) == set(ERRORS)
        for name, text in ERRORS.items():
            assert re.search(text, errors[name] or "no error"), errors[name]
    expected = ["cut", "default_0", "every_0_0_0", "every_1_0_0", "full.pt", "old_0_0"]
    assert sorted(os.listdir(tmp_path)) == [*expected, "part.pt_0", "part.pt_1", "trusted"]
    assert torch.load(tmp_path / "part.pt_1")["rank"] == 1
