"""The launcher as users start it: one process, torchrun, mpirun's variables; its options."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpxla.comm.addresses import reserved_port
from mpxla.tests.ranks.run import run_ranks_unpooled

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """\
import argparse
import logging
import os
import sys

import smdistributed.modelparallel.torch as smp
import torch
from helper import factor
from smdistributed.modelparallel import __version__

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO)  # without effect where a handler is there already
smp.init()
assert os.environ.get("RANK", "0") == str(smp.rank())
torch.cuda.set_device(smp.local_rank())
assert torch.cuda.current_device() == smp.local_rank()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean() * factor
    model.backward(loss)
    return loss


loss = train_step(model, torch.ones(4, 2).cuda()).reduce_mean()
optimizer.step()
logging.info("trained")
assert __name__ == "__main__" and loss.is_cuda and __version__ == smp.__version__ == "1.15.0"
assert os.path.isabs(__file__) and os.path.basename(sys.argv[0]) == "train.py"
ranks = f"{smp.rank()} {smp.size()} {smp.local_rank()}"
print(f"done {ranks} {torch.cuda.device_count()} {args.lr}\\n", end="")  # at once: ranks share it
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("factor = 2.0\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    settings = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "PYTHONPATH": str(REPOSITORY)}
    return {**kept, **settings, **variables}


def start(*command, **variables):
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, exit_code=0):
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
    assert process.returncode == exit_code, f"{output}\n{errors[-4000:]}"
    return output, errors


def done_lines(output):
    return sorted(line for line in output.splitlines() if line.startswith("done"))


@pytest.mark.slow
@pytest.mark.ranks
def test_one_process(script):
    output, _ = finish(start("-m", "mpxla.compat", os.path.relpath(script), "--lr", "0.1"))
    assert done_lines(output) == ["done 0 1 0 1 0.1"]


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun(script):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    config = '{"partitions": 2, "microbatches": 2}'
    process = start(
        *torchrun, "-m", "mpxla.compat", str(script), "--lr=0.5", SM_HP_MP_PARAMETERS=config
    )
    output, errors = finish(process)
    assert done_lines(output) == ["done 0 2 0 2 0.5", "done 1 2 1 2 0.5"]
    assert errors.count("INFO:root:trained") == 2, "the script's logging is its own"


@pytest.mark.slow
@pytest.mark.ranks
def test_mpirun(script):
    port = str(reserved_port("127.0.0.1"))
    processes = [
        start(
            *("-m", "mpxla.compat", str(script), "--lr", "1"),
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE="2",
            MASTER_PORT=port,
            SM_HP_MP_PARAMETERS='{"pipeline_parallel_degree": 2, "microbatches": 2}',
        )
        for rank in range(2)
    ]
    outputs = [finish(process)[0] for process in processes]
    assert done_lines("\n".join(outputs)) == ["done 0 2 0 2 1.0", "done 1 2 1 2 1.0"]


def launch(script):
    """What `python -m mpxla.compat` does, in a process that has imported torch already."""
    from mpxla.compat.__main__ import main

    sys.exit(main([script]))


def launched(path):
    (result,) = run_ranks_unpooled(launch, 1, str(path))
    return result


def launch_configured(words, config):
    from mpxla.compat.__main__ import main

    os.environ["SM_HP_MP_PARAMETERS"] = config  # as torchrun hands it on
    sys.exit(main(words))


@pytest.mark.ranks
def test_two_ranks(script):
    config = '{"partitions": 2, "microbatches": 2}'
    ranks = run_ranks_unpooled(launch_configured, 2, [str(script), "--lr=0.5"], config)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
    assert [done_lines(rank.stdout) for rank in ranks] == [
        ["done 0 2 0 2 0.5"],
        ["done 1 2 1 2 0.5"],
    ]


def ask_who_is_the_main_process():
    from mpxla.compat.launcher import mapped

    with mapped():
        import smdistributed.modelparallel.torch as smp
        from transformers.trainer_utils import is_main_process

        own = int(os.environ["LOCAL_RANK"])
        before = is_main_process(own)
        smp.init({"pipeline_parallel_degree": 2})
        return before, is_main_process(own)


@pytest.mark.ranks
def test_transformers_knows_the_main_process_whatever_the_backend():
    ranks = run_ranks_unpooled(ask_who_is_the_main_process, 2)
    assert [rank.value for rank in ranks] == [(True, True), (False, False)], ranks[0].stderr


@pytest.mark.ranks
def test_what_cannot_be_mapped_ends_the_script_with_its_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\n\nprint('before')\ngraph = torch.cuda.CUDAGraph()\n")
    result = launched(path)
    assert (result.exit_code, result.stdout) == (1, "before\n")
    last = next(line for line in reversed(result.stderr.splitlines()) if "CompatError: " in line)
    assert re.match(
        r".*CompatError: \S+/train.py:4: graph = torch.cuda.CUDAGraph\(\): torch.cuda.CUDAGraph "
        r"cannot be mapped onto an XLA device: step functions are captured and compiled anyway",
        last,
    ), last


REFUSED = """\
import smdistributed.modelparallel.torch as smp


def main():
    smp.init({"tensor_parallel_degree": 2})


main()
"""


@pytest.mark.slow  # cli/test_run.py has one in the fast tier
@pytest.mark.ranks
def test_one_rank_shows_an_error_and_the_script_s_frames_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(REFUSED)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    _, errors = finish(start(*torchrun, "-m", "mpxla.compat", str(path)), exit_code=1)
    lines = [line for line in errors.splitlines() if re.match(r"\[rank\d\]: ", line)]
    short = [line for line in lines if line.endswith("shows its error in full)")]
    assert len(short) in (0, 1), "torchrun may end the other rank before it says a word"
    first = [line for line in lines if line not in short]
    assert [line.partition(": ")[2] for line in first[:5:2]] == [
        "Traceback (most recent call last):",
        "    main()",
        '    smp.init({"tensor_parallel_degree": 2})',
    ]
    texts = [line.partition(": ")[2] for line in first]
    assert texts.count("Traceback (most recent call last):") == 1
    assert "mpxla/" not in "".join(texts)
    assert texts[-1] == "  - tensor_parallel_degree: 2 needs ddp: True"


@pytest.mark.ranks
def test_torchs_own_errors_about_cuda_get_the_scripts_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\n\ngenerator = torch.Generator(device='cuda')\n")
    result = launched(path)
    line = f"CompatError: {path}:3: generator = torch.Generator(device='cuda'): "
    assert f"{line}this asks torch for a CUDA device in a way that cannot be mapped" in (
        result.stderr
    )
    assert result.exit_code == 1


@pytest.mark.ranks
def test_the_scripts_exit_code_is_the_launchers(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit(7)\n")
    assert launched(path).exit_code == 7


OUTSIDE = """\
import contextlib
import sys

import torch
import torch._dynamo  # changes torch by itself, as export does
import torch.distributed

with contextlib.suppress(ImportError):
    import torch_xla  # so does this


def picture():
    modules = [m for n, m in sys.modules.items() if n.startswith(("torch.cuda", "torch.amp"))]
    owners = [torch, torch.distributed, torch.serialization, torch.random, torch.autocast, *modules]
    owners += [torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.nn.Linear]
    found = {(repr(o), name): value for o in owners for name, value in vars(o).items()}
    registry = list(torch.serialization._package_registry)
    modes = torch.overrides._get_current_function_mode_stack()
    return found, [type(o) for o in owners], registry, modes


before, *others = picture()
import mpxla as smp
import mpxla.compat.launcher

smp.init()
model = smp.DistributedModel(torch.nn.Linear(2, 3))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


train_step(model, torch.ones(4, 2)).reduce_mean().item()
optimizer.step()
after, *others_after = picture()
changed = {key for key, value in before.items() if after.get(key) is not value}
assert not changed and others == others_after, changed
assert not torch.cuda.is_available() and "smdistributed" not in sys.modules
print("done")
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_outside_the_launcher_nothing_of_torch_is_touched(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OUTSIDE)
    output, _ = finish(start(str(path)))
    assert done_lines(output) == ["done"]


# The command line needs no torch, so it is called here.


def test_help(capsys):
    from mpxla.compat.__main__ import main

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "usage: python -m mpxla.compat [OPTIONS] SCRIPT" in capsys.readouterr().out
    for wrong in ([], ["--unknown"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "usage: python -m mpxla.compat [OPTIONS] SCRIPT" in capsys.readouterr().err


def test_options_of_the_launcher_reach_what_they_change(script, monkeypatch):
    from mpxla.compat.__main__ import main
    from mpxla.env import read_environment

    shown = []
    monkeypatch.setenv("MPXLA_CONFIG", '{"microbatches": 4}')
    monkeypatch.setattr("mpxla.compat.launcher.run_script", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        "mpxla.session.show_uncaught", lambda env, is_complete: shown.append(is_complete)
    )
    for options in ([], ["--traceback"]):
        main([*options, str(script)])
    assert shown == [False, True]
    assert read_environment().mpxla_config == {"microbatches": 4}
    main(["--trust-checkpoints", str(script)])
    assert read_environment().mpxla_config == {"microbatches": 4, "trust_checkpoints": True}


def test_missing_script(capsys):
    from mpxla.compat.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(["nowhere.py"])
    assert "python -m mpxla.compat: error: there is no file nowhere.py" in capsys.readouterr().err


def test_check_lists_and_counts(script, capsys):
    from mpxla.compat.__main__ import main

    assert main(["--check", str(script)]) == 0
    output = capsys.readouterr().out
    assert "supported     smp.DistributedModel (line 19)" in output
    assert output.endswith("names of SMP and CUDA, 0 of them not supported\n")
    script.write_text(SCRIPT + "torch.cuda.CUDAGraph()\n")
    assert main(["--check", str(script)]) == 1
    assert (
        "not supported torch.cuda.CUDAGraph (line 37): step functions are captured"
        in capsys.readouterr().out
    )
