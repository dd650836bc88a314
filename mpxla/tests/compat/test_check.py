"""What `--check` reads off a script's text."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpxla.compat.check import check_script, format_findings
from mpxla.compat.names import Fate
from mpxla.tests.compat.launching import EXAMPLES

pytestmark = pytest.mark.unit


def check(tmp_path, text, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    script = tmp_path / "train.py"
    script.write_text(text)
    return check_script(script)


def summary(findings):
    return [(f.line, f.name, f.meaning.fate) for f in findings]


SUPPORTED, REFUSED, IDLE, DIFFERS = Fate.SUPPORTED, Fate.REFUSED, Fate.IDLE, Fate.DIFFERS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "import smdistributed.modelparallel.torch as smp\nsmp.init()\nsmp.state.cfg.fp16",
            [(2, "smp.init", SUPPORTED), (3, "smp.state.cfg.fp16", SUPPORTED)],
        ),
        (
            "import smdistributed.modelparallel.torch\nsmdistributed.modelparallel.torch.rank()",
            [(2, "smp.rank", SUPPORTED)],
        ),
        (
            "from smdistributed.modelparallel.torch import nn, tp_register as register\n"
            "nn.DistributedLinear(2, 3)\nregister(nn)",
            [
                (1, "smp.nn", SUPPORTED),
                (1, "smp.tp_register", SUPPORTED),
                (2, "smp.nn.DistributedLinear", SUPPORTED),
                (3, "smp.nn", SUPPORTED),
                (3, "smp.tp_register", SUPPORTED),
            ],
        ),
        (
            "from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint as c\n"
            "isinstance(x, c)\nc(f, x)",
            [
                (1, "smp.patches.checkpoint.checkpoint", SUPPORTED),
                (2, "smp.patches.checkpoint.checkpoint", SUPPORTED),
                (3, "smp.patches.checkpoint.checkpoint", SUPPORTED),
            ],
        ),
        (
            "from smdistributed.modelparallel.torch.state_mod import state, helper\n"
            "state.cfg.fp16\nhelper()\nclass Layer(smp.nn.DistributedModule): pass\n"
            "import smdistributed.modelparallel.torch as smp",
            [
                (1, "smp.state_mod.helper", SUPPORTED),
                (1, "smp.state_mod.state", SUPPORTED),
                (2, "smp.state_mod.state.cfg.fp16", SUPPORTED),
                (3, "smp.state_mod.helper", REFUSED),
                (4, "smp.nn.DistributedModule", SUPPORTED),
            ],
        ),
        (
            "import torch\nimport mpxla as smp\nwith smp.tensor_parallelism(): pass\n"
            "with smp.tensor_parallelism(enabled=args.tp): pass\n"
            "smp.set_tensor_parallelism(m, enabled=False)\n"
            "smp.model_creation(tensor_parallelism=True, dtype=torch.float16, zero_init=True)",
            [
                (3, "smp.tensor_parallelism", SUPPORTED),
                (4, "smp.tensor_parallelism", SUPPORTED),
                (5, "smp.set_tensor_parallelism", SUPPORTED),
                (6, "smp.model_creation", SUPPORTED),
            ],
        ),
        (
            "def train():\n    smp.nn.DistributedLinear(2, 2)\n"
            "if __name__ == '__main__':\n    import mpxla as smp\n    train()",
            [(2, "smp.nn.DistributedLinear", SUPPORTED)],
        ),
        ("import mpxla as smp\nsmp.size()", [(2, "smp.size", SUPPORTED)]),
        (
            "import mpxla as smp\nsmp.sizes()",
            [(2, "smp.sizes", REFUSED)],
        ),
        (
            "from smdistributed.modelparallel import __version__\n"
            "import smdistributed.dataparallel",
            [(2, "smdistributed.dataparallel", REFUSED)],
        ),
        (
            "import torch\ntorch.cuda.empty_cache()\ntorch.cuda.CUDAGraph()\n"
            "torch.cuda.nvtx.mark('a')\ntorch.cuda.nvtx.device('b')\n"
            "torch.cuda.streams.Event().record()",
            [
                (2, "torch.cuda.empty_cache", IDLE),
                (3, "torch.cuda.CUDAGraph", REFUSED),
                (4, "torch.cuda.nvtx.mark", IDLE),
                (5, "torch.cuda.nvtx.device", REFUSED),
                (6, "torch.cuda.streams.Event", SUPPORTED),
            ],
        ),
        (
            "import torch.cuda.amp as amp\nfrom torch.cuda.amp import custom_fwd\namp.autocast()",
            [
                (1, "torch.cuda.amp", SUPPORTED),
                (2, "torch.cuda.amp.custom_fwd", REFUSED),
                (3, "torch.cuda.amp.autocast", SUPPORTED),
            ],
        ),
        (
            "import torch\nd = torch.device('cuda' if a else 'cpu')\nx.to(f'cuda:{i}')\nx.to(0)\n"
            "x.cuda()\ntorch.zeros(2, device='cuda:1')\nx.to('cpu')\nx.to(d)",
            [
                (2, 'torch.device("cuda")', SUPPORTED),
                (3, '.to("cuda")', SUPPORTED),
                (4, '.to("cuda")', SUPPORTED),
                (5, ".cuda()", SUPPORTED),
                (6, 'device="cuda"', SUPPORTED),
            ],
        ),
        (
            "import torch\nfrom torch.backends import cudnn\ncudnn.benchmark = True\n"
            "torch.backends.cuda.matmul.allow_tf32 = True",
            [
                (3, "torch.backends.cudnn.benchmark", IDLE),
                (4, "torch.backends.cuda.matmul.allow_tf32", IDLE),
            ],
        ),
        ("if x.device.type == 'cuda': pass", [(1, '.type == "cuda"', DIFFERS)]),
        (
            "x.device.type in ('cpu', 'cuda')\n'cuda' in str(x.device)\n"
            "device.type.startswith('cuda')\nstr(device).startswith('cuda')\n"
            "name.startswith('cuda')\nstr(count) == 'cuda'\nx.device.type == 'cpu'",
            [(line, '.type == "cuda"', DIFFERS) for line in range(1, 5)],
        ),
        (
            "from smdistributed.modelparallel.torch import *\ninit()\ntp_register(1)\n"
            "from smdistributed.modelparallel.torch.amp import *\nGradScaler()\n"
            "from elsewhere import *",
            [
                (1, "smp.*", SUPPORTED),
                (2, "smp.init", SUPPORTED),
                (3, "smp.tp_register", SUPPORTED),
                (4, "smp.amp.*", SUPPORTED),
                (5, "smp.amp.GradScaler", SUPPORTED),
            ],
        ),
        (
            "model.register_post_step_hook(f)\noptimizer.clip_master_grads(1.0)\n"
            "norm = optimizer._global_grad_norm\nargs.loss_scale\nself.hparams.loss_scale",
            [
                (1, ".register_post_step_hook", SUPPORTED),
                (2, ".clip_master_grads", SUPPORTED),
                (3, "._global_grad_norm", SUPPORTED),
            ],
        ),
        (
            "import mpxla\nmpxla.init({'sharded_data_parallel_degree': 2, "
            "'tensor_parallel_degree': args.tp, 'microbatches': 4})",
            [
                (2, "smp.init", SUPPORTED),
            ],
        ),
        (
            "import mpxla\nconfig = {'tensor_parallel_degree': 2}\nmpxla.init(config)\n"
            "mpxla.init(unknown)",
            [
                (3, "smp.init", SUPPORTED),
                (4, "smp.init", SUPPORTED),
            ],
        ),
        (
            "import mpxla\nmpxla.init(dict(sharded_data_parallel_degree=2))",
            [
                (2, "smp.init", SUPPORTED),
            ],
        ),
    ],
)
def test_names_are_found(tmp_path, text, expected):
    assert summary(check(tmp_path, text)) == expected


def test_reasons_name_the_missing_feature(tmp_path):
    text = "import mpxla as smp\noptimizer._global_grad_norm\nsmp.sizes"
    reasons = [finding.meaning.text for finding in check(tmp_path, text)]
    assert reasons == [
        "an error without sharded_data_parallel_degree",
        "mpxla knows no such name of SMP; remove the use, importing it does no harm",
    ]


def test_files_beside_the_script_are_read_once(tmp_path):
    findings = check(
        tmp_path,
        "import model\nfrom data import loader\nimport json",
        model="import data\nx.cuda()",
        data="import model\nimport torch\ntorch.cuda.CUDAGraph()",
    )
    assert [(f.file.name, f.name) for f in findings] == [
        ("model.py", ".cuda()"),
        ("data.py", "torch.cuda.CUDAGraph"),
    ]


def test_relative_imports_are_followed(tmp_path):
    package = tmp_path / "parts"
    (package / "below").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from .below.inner import run\nfrom .torch.cuda import Event"
    )
    (package / "below" / "inner.py").write_text("from .. import deeper\nx.cuda()")
    (package / "deeper.py").write_text("import torch\ntorch.cuda.CUDAGraph()")
    findings = check(tmp_path, "import parts")
    # Nothing of `parts.torch`, which is not torch.
    assert [(f.file.name, f.name) for f in findings] == [
        ("inner.py", ".cuda()"),
        ("deeper.py", "torch.cuda.CUDAGraph"),
    ]


def test_the_table_puts_what_is_not_supported_first(tmp_path):
    findings = check(tmp_path, "import torch\nx.cuda()\ntorch.cuda.CUDAGraph()\ny.cuda()")
    head, *rows, total = format_findings(findings).splitlines()
    assert head == f"{tmp_path / 'train.py'}:"
    assert rows[0].startswith("  not supported torch.cuda.CUDAGraph (line 3): step functions are")
    assert rows[1] == "  supported     .cuda() (line 2, 4): the rank's XLA device"
    assert total == "2 names of SMP and CUDA, 1 of them not supported"


def test_what_is_not_python_is_an_error(tmp_path):
    with pytest.raises(SyntaxError, match=r"train.py, line 1"):
        check(tmp_path, "def (:")


def test_checking_loads_no_torch(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.is_available()")
    code = (
        "import sys; from mpxla.compat.__main__ import main; "
        f"main(['--check', {str(tmp_path / 'train.py')!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True)


PROGRAMS = [*EXAMPLES.glob("*.py"), *(Path(__file__).parent / "programs").glob("*.py")]


@pytest.mark.parametrize("script", sorted(PROGRAMS), ids=lambda path: path.stem)
def test_programs_that_run_are_found_to_run(script):
    assert [finding for finding in check_script(script) if finding.is_refused] == []
