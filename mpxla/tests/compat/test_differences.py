"""What runs and is another thing than under SMP on CUDA devices: lines of `docs/migrating.md`."""

import argparse
import io
import pickle
from fractions import Fraction

import pytest
import torch

from mpxla.tests.backends import backend_here
from mpxla.tests.clients import logged
from mpxla.tests.compat.launching import inside
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def train_and_count():
    import smdistributed.modelparallel.torch as smp

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(torch.nn.Linear(2, 1))
    settings, runs = argparse.Namespace(scale=1.0), io.StringIO()

    @smp.step
    def step(model, x, factor):
        runs.write(".")  # lists and numbers are kept as if every microbatch ran in Python
        loss = (0 * model(x)).sum() + settings.scale * factor
        model.backward(loss)
        return loss

    counts, losses = [], []
    for scale, factor in ((1.0, 1.0), (1.0, 1.0), (5.0, 1.0), (5.0, 7.0), (5.0, 8.0)):
        settings.scale = scale
        losses.append(step(model, torch.ones(4, 2).cuda(), factor).reduce_mean().item())
        counts.append(len(runs.getvalue()))
    return losses, counts


def test_step_functions_run_in_python_once_and_notice_values_that_change():
    losses, counts = inside(train_and_count)
    first, again, other_scale, other_factor, third_factor = counts
    assert 1 <= first == again < other_scale < other_factor
    assert third_factor == other_factor, "a float that has changed is an input"
    assert losses == [1.0, 1.0, 5.0, 35.0, 40.0]


def ask_in_a_step():
    import smdistributed.modelparallel.torch as smp

    smp.init()
    model = smp.DistributedModel(torch.nn.Linear(2, 1))

    @smp.step
    def step(model, x):
        places = torch.arange(2, device=x.device) + torch.zeros(2, device="cuda")
        output = model(x * places.cuda().to("cuda"))
        return output, (str(x.device), x.is_cuda, str(torch.device("cuda")))

    output, (place, is_cuda, named) = step(model, torch.ones(4, 2).cuda())
    return output.concat().is_cuda, (place, *set(is_cuda), named), str(backend_here().device)


def test_tensors_read_as_host_tensors_while_a_step_is_captured():
    is_cuda, answers, device = inside(ask_in_a_step)
    assert is_cuda
    assert answers == ("cpu", device == "cpu", device)


SCRIPT = """\
import torch
device = torch.device("cuda")
if device.type == "cuda":
    raise RuntimeError("it is not")
"""


def test_comparisons_of_the_device_type_are_warned_of(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (lines,) = run_ranks(run_and_listen, 1, script)
    assert lines == [
        f"WARNING: {script}:3: .type == \"cuda\": False: the type of the script's device is 'xla', "
        "or 'cpu'"
    ]


def run_and_listen(script):
    from mpxla.compat.launcher import run_script

    with logged() as lines:
        run_script(script, [])
    return lines


def test_objects_that_could_run_code_are_not_loaded(tmp_path):
    run_ranks(save_and_load, 1, str(tmp_path / "x.pt"))


def save_and_load(path):
    from mpxla.compat.launcher import mapped
    from mpxla.errors import CheckpointError

    with mapped():
        import smdistributed.modelparallel.torch as smp

        smp.init()
        smp.save({"args": argparse.Namespace(lr=0.1), "rate": Fraction(1, 2)}, path, partial=False)
        with pytest.raises(CheckpointError, match=r"could run code"):
            smp.load(path, partial=False)
        with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only") as refused:
            torch.load(path)
        assert "--trust-checkpoints lets torch.load take it" in refused.value.__notes__[0]
        assert smp.load(path, partial=False, weights_only=False)["args"].lr == 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPXLA_CONFIG", '{"trust_checkpoints": true}')
        with mapped():
            assert torch.load(path)["args"].lr == 0.1
            with pytest.raises(pickle.UnpicklingError):
                torch.load(path, weights_only=True)
