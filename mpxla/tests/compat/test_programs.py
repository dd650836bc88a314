"""Whole programs as SMP's users write them, unedited, end where their plain counterparts end.

They lie in `programs/`, each beside its plain counterpart. Losses, norms and weights are compared.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from mpxla.tests.compat.launching import forget_files_beside
from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "programs"


def launch(name, arguments):
    """Runs a program as the launcher does. Returns its results as host tensors."""
    from mpxla.compat.launcher import run_script

    os.environ.pop("SM_HP_MP_PARAMETERS", None)
    if name == "bert":
        os.environ["SM_HP_MP_PARAMETERS"] = '{"partitions": 2, "microbatches": 2}'
    script = PROGRAMS / f"{name}.py"
    forget_files_beside(script)
    return run_script(script, arguments)["found"]


def plain(name, *arguments):
    """Calls `main` of a plain counterpart, on a rank, as transformers is there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
        forget_files_beside(PROGRAMS / name)
        return importlib.import_module(f"{name}_plain").main(*arguments)


def compare(name):
    """Results of two stages are those of one plain process."""
    (expected,) = run_ranks(plain, 1, name)
    for found in run_ranks(launch, 2, name, []):
        assert_close(found, expected)


def assert_close(found, expected):
    assert len(found["losses"]) == len(expected["losses"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4, abs=1e-5)
    assert found.get("rate") == expected.get("rate")
    assert found["weights"].keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key].cpu(), value, rtol=1e-3, atol=1e-4)


def test_residual_network_with_stages_by_hand():
    compare("resnet")


def test_clipping_with_a_rate_for_every_layer():
    compare("bert")


def test_sequences_whose_batch_is_axis_1_and_tied_weights():
    compare("translate")


def test_two_optimizers_and_averaged_weights():
    compare("average")


def test_fine_tuning_that_goes_on_in_another_job(tmp_path):
    folder = str(tmp_path / "pretrained")
    run_ranks(make_pretrained, 1, folder)
    expected = run_ranks(plain, 1, "gpt", folder)[0]
    arguments = ["--model_name_or_path", folder, "--output_dir", str(tmp_path)]
    first = run_ranks(launch, 4, "gpt", [*arguments, "--last_epoch", "1"])
    second = run_ranks(launch, 4, "gpt", arguments)
    for before, after in zip(first, second, strict=True):
        after["losses"] = before["losses"] + after["losses"]
        assert_close(after, expected)


def make_pretrained(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
        importlib.import_module("gpt_plain").make_pretrained(folder)
