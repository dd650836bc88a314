"""Small scripts: what `--check` says of them is what happens when they run."""

import importlib.machinery
import sys
from pathlib import Path

import pytest

from mpxla.compat import CompatError
from mpxla.compat.check import check_script
from mpxla.errors import ConfigError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

HEAD = "import torch\nimport smdistributed.modelparallel.torch as smp\n"
NN = "from smdistributed.modelparallel.torch.nn import "
RUNS = {
    "names that are only imported": NN
    + "DistributedLinear, FusedLayerNorm, huggingface\n"
    + "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (\n"
    + "    translate_hf_state_dict_to_smdistributed_gpt2 as translate)\n"
    + "from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint\n"
    + "from smdistributed.modelparallel.torch import tp_register, some_private_helper\n"
    + "assert not isinstance(torch.nn.Linear(1, 1), DistributedLinear)\n"
    + "assert FusedLayerNorm is torch.nn.LayerNorm\n"
    + "hooks = {'gpt2': translate}\n",
    "submodules": "import smdistributed.modelparallel.torch.state_mod\n"
    + "from smdistributed.modelparallel.torch.state_mod import state\n"
    + "from smdistributed.modelparallel.torch.utils import helper\n"
    + "smp.init()\nassert state.cfg.microbatches == 1\n"
    + "assert smp.model.DistributedModel is smp.DistributedModel\n",
    "switches that are off": "smp.init()\n"
    + "with smp.tensor_parallelism(enabled=False): pass\n"
    + "with smp.model_creation(tensor_parallelism=False): pass\n",
    "a setting of the script": "import argparse\nargs = argparse.Namespace(loss_scale=2)\n"
    + "smp.init()\nprint(args.loss_scale)\n",
    "switches that are off by position": "smp.init()\nlayer = torch.nn.Linear(1, 1)\n"
    + "with smp.tensor_parallelism(False): pass\nsmp.set_tensor_parallelism(layer, False)\n"
    + "with smp.model_creation(False, torch.float32): pass\n",
    "settings of switches": "args = {'tp': False}\nsmp.init()\n"
    + "with smp.tensor_parallelism(enabled=args['tp']): pass\n"
    + "with smp.model_creation(**{'tensor_parallelism': False}): pass\n",
    "recomputation": "smp.init()\n"
    + "model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(1, 1)))\n"
    + "for layer in model.get_module().children():\n"
    + "    smp.set_activation_checkpointing(layer, strategy='each', pack_args_as_tuple=True)\n",
    "recomputed calls": "from smdistributed.modelparallel.torch.patches.checkpoint import (\n"
    + "    checkpoint, checkpoint_sequential)\n"
    + "smp.init()\nlayer = torch.nn.Sequential(torch.nn.Linear(1, 1))\nx = torch.ones(1, 1)\n"
    + "assert checkpoint(layer, x, preserve_rng_state=False) == layer(x)\n"
    + "assert checkpoint_sequential(layer, x, strategy='contiguous') == layer(x)\n",
    "main below": "def main():\n    lib.init()\n    assert lib.size() == 1\n"
    + "if __name__ == '__main__':\n"
    + "    import smdistributed.modelparallel.torch as lib\n    main()\n",
    "a package": "from parts.model import Model\nassert Model is not None\n",
    "guarded names": "try:\n    from smdistributed.modelparallel.torch.nn import Anything\n"
    + "except ImportError:\n    Anything = None\n"
    + "if hasattr(smp, 'set_activation_checkpointing'):\n    flag = True\n",
    "an expected absence": "try:\n    import smdistributed.dataparallel.torch.distributed as dist\n"
    + "except ModuleNotFoundError:\n    import torch.distributed as dist\nprint(dist)\n",
    "versions": "import smdistributed.modelparallel\nfrom packaging import version\n"
    + "found = version.parse(smdistributed.modelparallel.__version__)\n"
    + "assert found >= version.parse('1.10') and smp.__version__ == str(found)\n",
    "features that are off": "import argparse\nargs = argparse.Namespace(fp16=0, tp=1)\n"
    + "smp.init({'fp16': args.fp16 > 0, 'tensor_parallel_degree': args.tp, 'bf16': False,\n"
    + "    'sharded_data_parallel_degree': 1, 'offload_activations': True})\n",
    "half precision if asked for": "smp.init()\n"
    + "model = smp.DistributedModel(torch.nn.Linear(1, 1))\n"
    + "optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))\n"
    + "if smp.state.cfg.fp16:\n    optimizer.clip_master_grads(1.0)\n"
    + "    if not optimizer.overflow:\n        print(optimizer.loss_scale)\n"
    + "if not smp.state.cfg.fp16:\n    pass\nelse:\n    optimizer.clip_master_grads(1.0)\n"
    + "assert not (smp.state.cfg.fp16 and optimizer.overflow)\n"
    + "assert not smp.state.cfg.fp16 or optimizer.overflow\n",
    "words of others": "class Meter:\n    loss_scale = overflow = 1\n"
    + "meter = Meter()\nprint(meter.loss_scale, meter.overflow)\nsmp.init()\n",
    "scalers that are off": "smp.init()\nscaler = smp.amp.GradScaler(enabled=False)\n"
    + "assert scaler.scale(3) == 3\nother = smp.amp.GradScaler()\nscaler.update()\n",
    "names of cuda": "smp.init()\ntorch.cuda.set_device(smp.local_rank())\n"
    + "torch.cuda.empty_cache()\ntorch.cuda.nvtx.range_push('x')\n"
    + "torch.backends.cudnn.benchmark = True\ntorch.backends.cuda.matmul.allow_tf32 = True\n"
    + "assert torch.cuda.is_available() and torch.cuda.device_count() == 1\n",
    "files of an optimizer": "import tempfile\nsmp.init()\n"
    + "model = smp.DistributedModel(torch.nn.Linear(1, 1))\n"
    + "optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1))\n"
    + "with tempfile.TemporaryDirectory() as folder:\n"
    + "    optimizer.save_optimizer_backcompat(f'{folder}/optimizer')\n"
    + "    optimizer.load_optimizer_backcompat(f'{folder}/optimizer')\n",
    "everything imported": "from smdistributed.modelparallel.torch import *\n"
    + "init()\nassert rank() == 0 and size() == 1\n",
    "a fused optimizer": "from smdistributed.modelparallel.torch.optimizers import FusedLAMB\n"
    + "smp.init()\nmodel = smp.DistributedModel(torch.nn.Linear(1, 1))\n"
    + "assert smp.optimizers.FusedLamb is FusedLAMB\n"
    + "smp.DistributedOptimizer(FusedLAMB(model.parameters(), lr=0.1))\n"
    + "smp.DistributedOptimizer(smp.optimizers.FusedNovoGrad(model.parameters()))\n",
    "hooks": "smp.init()\nmodel = smp.DistributedModel(torch.nn.Linear(1, 1))\n"
    + "model.register_post_partition_hook(lambda model, optimizer: None)\n"
    + "model.register_post_step_hook(lambda model, optimizer: None)\n"
    + "smp.register_parameter(model.get_module(), model.get_module().weight)\n",
    "run as python does": "import os, sys\n"
    + "assert sys.path[0] == os.path.dirname(__file__) and '/the/launcher' not in sys.path\n"
    + "assert sys.modules['__main__'].__file__ == __file__ and sys.argv == [__file__]\n",
    "another package": "import smdistributed.elsewhere as other\nassert other.VALUE == 3\n",
}
REFUSED = {
    "hooks": "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (\n"
    "    get_hf_gpt2_transformer_layer_hooks as hooks)\nhooks()",
    "a helper": "from smdistributed.modelparallel.torch.utils import helper\nhelper()",
    "a private name": "from smdistributed.modelparallel.torch import _helper\n_helper(1)",
    "a module": "from smdistributed.modelparallel.torch.nn.huggingface import gpt2\n"
    "gpt2.get_hf_gpt2_transformer_layer_hooks()",
    "a graph": "torch.cuda.CUDAGraph()",
    "a type of cuda": "torch.cuda.FloatTensor(2)",
    "a package that uses": "from parts import layers\nlayers.make()",
    "an absent package": "import smdistributed.dataparallel.torch as dp",
    "settings": "settings = {'microbatches': 1, 'ddp': True}\nsmp.init(settings)\n"
    "smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()",
    "imports below": "def train():\n    names.get_hf_gpt2_transformer_layer_hooks()\n"
    "if True:\n    import smdistributed.modelparallel.torch.nn.huggingface.gpt2 as names\n"
    "    train()",
}


def write(folder: Path, scripts):
    installed = folder / "installed" / "smdistributed"
    installed.mkdir(parents=True)
    (installed / "elsewhere.py").write_text("VALUE = 3\n")
    parts = folder / "parts"
    parts.mkdir()
    (parts / "__init__.py").write_text("")
    (parts / "model.py").write_text("from .sizes import WIDTH as Model\n")
    (parts / "sizes.py").write_text("WIDTH = 2\n")
    (parts / "layers.py").write_text(
        "import smdistributed.modelparallel.torch as smp\n\n\n"
        "def make():\n    return smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()\n"
    )
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(HEAD + text)


def outcomes(folder, names):
    """What each script raises on one rank, as text."""
    import mpxla as smp
    from mpxla.compat.launcher import run_script
    from mpxla.user_lines import script_line_of

    seen = {}
    with pytest.MonkeyPatch.context() as patch:  # the process serves other tests after this one
        patch.setattr(sys, "path", ["/the/launcher", *sys.path, f"{folder}/installed"])
        before = list(sys.path), sys.argv, sys.modules["__main__"]
        for name in names:
            try:
                run_script(Path(folder) / f"{name}.py", [])
                seen[name] = ""
            except (CompatError, ConfigError) as error:
                seen[name] = str(error)
            except (AttributeError, ImportError) as error:
                seen[name] = f"{script_line_of(error)}: {error}"
            finally:
                if smp.is_initialized():
                    smp.shutdown()
            assert before == (sys.path, sys.argv, sys.modules["__main__"]), name
    for name in [name for name in sys.modules if name.startswith(("smdistributed", "parts"))]:
        del sys.modules[name]
    return seen


def test_the_verdict_is_what_happens(tmp_path, monkeypatch):
    scripts = RUNS | REFUSED
    write(tmp_path, scripts)
    (seen,) = run_ranks(outcomes, 1, str(tmp_path), list(scripts))
    # After the ranks, which start with this process's path and serve other tests too.
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert importlib.machinery.PathFinder.find_spec("smdistributed") is not None
    for name, text in seen.items():
        findings = check_script(tmp_path / f"{name}.py")
        is_refused = any(finding.is_refused for finding in findings)
        assert (name in REFUSED) == bool(text) == is_refused, (name, text, findings)
        if text and "the configuration has" not in text:
            assert ".py:" in text
