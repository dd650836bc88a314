"""Small scripts: what `--check` says of them is what happens when they run."""

import importlib.machinery
import logging
import sys
from pathlib import Path

import pytest

from mpxla.compat import CompatError
from mpxla.compat.check import check_script
from mpxla.errors import ConfigError
from mpxla.testing import run_ranks

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
    + "assert isinstance(torch.nn.LayerNorm(1), FusedLayerNorm)\n"
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
    "another package": "import smdistributed.elsewhere as other\nassert other.VALUE == 3\n",
}
REFUSED = {
    "a layer": "smp.nn.DistributedLinear(2, 2)",
    "a base": "class Layer(smp.nn.DistributedModule):\n    pass",
    "a decorated class": "@smp.tp_register(torch.nn.Linear)\nclass Layer:\n    pass",
    "a translation": "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (\n"
    "    translate_state_dict_to_hf_gpt2)\ntranslate_state_dict_to_hf_gpt2({})",
    "a helper": "from smdistributed.modelparallel.torch.utils import helper\nhelper()",
    "a private name": "from smdistributed.modelparallel.torch import _helper\n_helper(1)",
    "tensor parallelism": "with smp.tensor_parallelism():\n    pass",
    "tensor-parallel creation": "with smp.model_creation(tensor_parallelism=True):\n    pass",
    "half creation": "with smp.model_creation(dtype=torch.float16):\n    pass",
    "sharded creation": "with smp.model_creation(zero_init=True):\n    pass",
    "a configuration": "smp.init({'fp16': True})",
    "imports below": "def train():\n    layers.DistributedLinear(2, 2)\n"
    "if True:\n    import smdistributed.modelparallel.torch.nn as layers\n    train()",
}


def write(folder: Path, scripts):
    installed = folder / "installed" / "smdistributed"
    installed.mkdir(parents=True)
    (installed / "elsewhere.py").write_text("VALUE = 3\n")
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(HEAD + text)


def outcomes(folder, names):
    """What each script raises on one rank, as text."""
    import mpxla as smp
    from mpxla.compat.launcher import run_script

    seen = {}
    with pytest.MonkeyPatch.context() as patch:  # the process serves other tests after this one
        patch.setattr(sys, "path", [*sys.path, f"{folder}/installed"])
        for name in names:
            try:
                run_script(Path(folder) / f"{name}.py", [])
                seen[name] = ""
            except (CompatError, ConfigError) as error:
                seen[name] = str(error)
            finally:
                if smp.is_initialized():
                    smp.shutdown()
    for name in [name for name in sys.modules if name.startswith("smdistributed")]:
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
        if text and "ConfigError" not in text and name != "a configuration":
            assert f"{name}.py:" in text


def configure_logging():
    import mpxla as smp

    before = list(logging.root.handlers)
    smp.init({"microbatches": 1})
    smp.shutdown()
    return logging.root.handlers == before


def test_the_root_logger_is_left_to_the_script():
    assert run_ranks(configure_logging, 1) == [True]
