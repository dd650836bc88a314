"""Which module may import which, and what an import costs."""

import ast
import functools
import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpxla
from mpxla import collection
from mpxla.collection import collection_paused

pytestmark = pytest.mark.unit

ROOT = Path(mpxla.__file__).parent

# From the bottom up: a module may import its own layer and those below it.
LAYERS = (
    ("collection", "errors", "log", "random_states", "tables", "user_lines"),
    ("uncaught", "delayed"),
    ("env", "config_keys"),
    ("config_rules", "config", "config_sources"),
    ("topology",),
    # Graphs are cut into stage specifications, so these two know each other's vocabulary.
    ("schedule", "graph", "comm", "stage.spec", "kept"),
    ("device.backend", "device.alone"),
    ("stage", "planning"),
    ("device.relay",),
    ("device.cpu_world", "device.fused", "device.convolution", "device.messages", "device.views"),
    ("device.torch_xla", "device.pjrt", "device.eager"),
    ("device.choice", "device"),
    ("connection",),
    ("session",),
    ("runtime",),
    ("nn",),
    ("parallel", "checkpoint"),
    ("api", "amp", "patches", "sharded_data_parallel_checkpoint"),
    ("compat",),
    ("__init__", "cli", "__main__"),
)
# Inside the layer of the vocabulary nobody imports its neighbours.
APART = ({"schedule"}, {"graph", "stage.spec"}, {"comm"})
# What breaks the rule, and why.
EXCEPTIONS = {
    ("session", "parallel.models"): "an annotation: the session holds the models",
}

NO_TORCH = (
    "errors",
    "log",
    "user_lines",
    "uncaught",
    "env",
    "config",
    "config_keys",
    "config_rules",
    "config_sources",
    "topology",
)
NO_TORCH_PACKAGES = ("schedule", "planning")
PURE_GRAPH = tuple(
    f"graph.partition.{path.stem}" for path in sorted((ROOT / "graph/partition").glob("[!_]*.py"))
)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package without its tests, by its name inside mpxla."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "tests":
            found[".".join(parts)] = path
    return found


@functools.cache
def tree_of(module: str) -> ast.Module:
    """A module's text, parsed once."""
    return ast.parse(modules()[module].read_text())


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """All nodes of a module's tree, which several tests look through."""
    return list(ast.walk(tree_of(module)))


def layer_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for number, names in enumerate(LAYERS):
            if prefix in names:
                return number
    raise AssertionError(f"{module} has no layer; add it to LAYERS")


def imports_of(module: str) -> Iterator[str]:
    """Modules of mpxla that a module imports anywhere in its text."""
    known = modules()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        else:
            continue
        for name in names:
            inside = name.removeprefix("mpxla.")
            if name.startswith("mpxla.") and inside in known:
                yield inside


def group_of(module: str) -> set[str] | None:
    names = {module, module.split(".")[0]}
    return next((group for group in APART if names & group), None)


def violations() -> Iterator[tuple[str, str]]:
    for module in modules():
        if module == "__init__":
            continue  # lazily, everything
        for imported in imports_of(module):
            mine, theirs = group_of(module), group_of(imported)
            is_neighbour = mine is not None and theirs is not None and mine is not theirs
            same = layer_of(module) == layer_of(imported) == layer_of("schedule")
            if layer_of(imported) > layer_of(module) or (same and is_neighbour):
                yield module, imported


def test_every_module_has_a_layer():
    for module in modules():
        layer_of(module)


def test_imports_point_downwards():
    assert set(violations()) == set(EXCEPTIONS)


def test_the_check_sees_violations():
    assert layer_of("errors") < layer_of("graph.split") < layer_of("stage.lower")
    assert layer_of("stage.lower") < layer_of("runtime.plans.plan") < layer_of("parallel.model")
    assert layer_of("graph.split") == layer_of("stage.spec")
    assert {"runtime.states", "session"} <= set(imports_of("parallel.model"))
    assert group_of("comm.host") != group_of("schedule.lower")


def third_party(module: str) -> set[str]:
    """Top-level packages that a module imports at its top level."""
    found = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def test_planning_uses_neither_torch_nor_torch_xla():
    planning = [m for m in modules() if m in NO_TORCH or m.split(".")[0] in NO_TORCH_PACKAGES]
    assert len(planning) > 12
    for module in (*planning, *PURE_GRAPH):
        assert not third_party(module) & {"torch", "torch_xla"}, module
    for module in planning:
        assert "numpy" not in third_party(module), module


# Names of packages that only the folder of their backend may import, however it does so.
BACKENDS = {
    "device.torch_xla": {"torch_xla", "jax", "jaxlib"},
    "device.pjrt": {"jax", "jaxlib"},
    "device.cpu_world": {"jax", "jaxlib"},
}
# Texts that mean pending work and kinds of tensors, which only backends know.
_DEVICE_WORDS = re.compile(
    r"\bmake_ready\b|\.is_xla\b|\.type [!=]= \"xla\"|\bxm\.|_XLAC\b"
    r"|(?<!backend)(?<!\(\))\.sync\("
)


def backend_packages(module: str) -> set[str]:
    """Packages of backends that a module imports anywhere in its text, by name too."""
    found = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found |= {str(text).split(".")[0] for text in texts}
    return found & {"torch_xla", "jax", "jaxlib"}


def test_only_backends_import_their_packages():
    for module in modules():
        allowed = next((p for f, p in BACKENDS.items() if module.startswith(f)), set())
        assert backend_packages(module) <= allowed, module


def test_only_backends_know_pending_work():
    for module, path in modules().items():
        text = path.read_text()
        if not module.startswith("device"):
            assert not _DEVICE_WORDS.findall(text), module


def test_only_env_reads_the_environment():
    readers = set()
    for module in modules():
        for node in nodes_of(module):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                readers.add(module)
    assert readers == {"env"}


# What an import brings with it, in a fresh process.

_REPORT = """
import json, sys
before = set(sys.modules)
{statement}
loaded = set(sys.modules) - before
json.dump(sorted(loaded), sys.stdout)
"""


def loaded_by(statement: str) -> set[str]:
    """Modules that a statement loads in a fresh interpreter."""
    code = _REPORT.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stdout))


def packages(loaded: set[str]) -> set[str]:
    return {name.split(".")[0] for name in loaded}


def test_importing_mpxla_loads_next_to_nothing():
    """So `import mpxla` adds nothing to `import torch`; time itself is too noisy for a test."""
    loaded = loaded_by("import mpxla")
    own = {name for name in loaded if name.startswith("mpxla")}
    assert own <= {"mpxla", "mpxla.collection", "mpxla.env", "mpxla.errors"}
    assert not packages(loaded) & {"torch", "torch_xla", "numpy"}
    assert len(loaded) < 80


_COLLECTIONS = """
import gc, json, sys
import torch
import mpxla
found = []
gc.callbacks.append(lambda phase, facts: found.append(phase))
mpxla.DistributedModel
json.dump([found.count("start"), gc.isenabled()], sys.stdout)
"""


@pytest.mark.slow
def test_imports_are_not_interrupted_by_searches_for_garbage():
    """Each search looks through all of torch; there were dozens, for 0.5 s in all."""
    command = [sys.executable, "-c", _COLLECTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    num_searches, is_enabled = json.loads(done.stdout)
    assert num_searches == 0, "not even one when the imports had ended"
    assert is_enabled


def test_who_has_switched_searches_off_has_them_off():
    gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_script_has_frozen_stays_frozen(monkeypatch):
    monkeypatch.setattr(collection, "_is_frozen", False)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collection_paused():
            made = [[] for _ in range(100)]
        assert gc.get_freeze_count() >= frozen - len(made)
    finally:
        gc.unfreeze()
    monkeypatch.setattr(collection, "_is_frozen", False)
    with collection_paused():
        made = [[] for _ in range(100)]
    assert not gc.get_freeze_count() and gc.isenabled()


def test_frozen_objects_are_counted_once(monkeypatch):
    counted = []
    monkeypatch.setattr(collection, "_is_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 5)
    for _ in range(3):
        with collection_paused():
            pass
    assert counted == [1]


class Cycle:
    def __init__(self):
        self.own = self


@pytest.mark.slow
def test_garbage_of_many_traces_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(collection, "_MANY", 100_000)
    first = None
    for _ in range(12):
        with collection_paused():
            made = [Cycle() for _ in range(10_000)]
            first = first or weakref.ref(made[0])
            del made
    assert first() is None


def test_planning_loads_no_torch():
    statements = [
        "import mpxla",
        *(f"import mpxla.{name}" for name in NO_TORCH),
        *(f"import mpxla.{name}" for name in modules() if name.split(".")[0] in NO_TORCH_PACKAGES),
        *(f"import mpxla.{name}" for name in PURE_GRAPH),
        "mpxla.CommGroup, mpxla.WORLD, mpxla.ConfigError",
    ]
    loaded = loaded_by("\n".join(line.removesuffix(".__init__") for line in statements))
    assert "mpxla.schedule.simulate" in loaded
    assert "mpxla.graph.partition.auto" in loaded
    assert not packages(loaded) & {"torch", "torch_xla"}


_WITHOUT_BACKENDS = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("torch_xla", "jax", "jaxlib"):
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.slow
def test_all_but_backends_is_imported_without_any():
    """As where torch_xla is not installed; what is asked for then says what to install."""
    own = [m.removesuffix(".__init__") for m in modules() if not m.startswith(tuple(BACKENDS))]
    own = [m for m in own if m not in ("__init__", "__main__", "compat.__main__")]
    # Errors, tags and capture need torch only, also where the others are installed.
    lines = ["import mpxla.graph.capture.step, mpxla.parallel.tags, mpxla.runtime.microbatch"]
    lines += ["assert 'torch' in sys.modules and 'torch_xla' not in sys.modules"]
    lines += [_WITHOUT_BACKENDS, *(f"import mpxla.{name}" for name in own)]
    lines += [
        "from mpxla.device.choice import open_backend",
        "try: open_backend(mpxla.env.LaunchEnv())",
    ]
    lines += ["except mpxla.ConfigError as error: assert 'mpxla[torch-xla]' in str(error), error"]
    lines += ["else: raise AssertionError('a backend was found')"]
    loaded = loaded_by("\n".join(lines))
    assert "mpxla.session" in loaded
    assert not packages(loaded) & {"torch_xla", "jax", "jaxlib"}
