"""Lists the names of SMP and CUDA that a script uses, by reading its text.

Follows imports of files that lie beside the script, since training programs come as several files.
What a variable holds is not known from the text: methods are recognized by names that only SMP's
classes have. This module must not import torch.
"""

import ast
import importlib.machinery
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpxla.compat.names import (
    BACKEND_FLAG,
    IS_CUDA_TYPE,
    METHODS,
    SMP_MODULES,
    SMP_PACKAGE,
    UNKNOWN,
    Fate,
    Name,
    cuda_name,
    smp_name,
)

__all__ = ["Finding", "check_script", "format_findings"]

_ON_DEVICE = Name(Fate.SUPPORTED, "the rank's XLA device")
_OTHER_PACKAGE = Name(Fate.REFUSED, "it is not installed; remove the import")
_EXPECTED = Name(Fate.SUPPORTED, "it is not installed, for which the script is prepared")
_INSTALLED = Name(Fate.SUPPORTED, "an installed package")
_MENTIONED = "may be imported and compared with; to use it is an error"
_CATCHES_IMPORTS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_COMMON_WORDS = ("loss_scale", "overflow")
"""Attributes of an optimizer that other objects have too."""


class Finding(NamedTuple):
    """One use of a name."""

    file: Path
    line: int
    name: str
    meaning: Name

    @property
    def is_refused(self) -> bool:
        """Whether the name is not supported."""
        return self.meaning.fate is Fate.REFUSED


def check_script(script: Path) -> list[Finding]:
    """Reads a script, and the files beside it that it imports.

    Returns:
        Every use of a name, by file and line.

    Raises:
        SyntaxError: a file is not Python.
    """
    findings: list[Finding] = []
    waiting, seen = [script], set[Path]()
    while waiting:
        file = waiting.pop(0)
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        tree = ast.parse(file.read_bytes(), str(file))
        reader = _Reader(file)
        reader.read(tree)
        findings += sorted(set(reader.findings), key=lambda f: (f.line, f.name))
        waiting += _files_beside(script.parent, file.parent, tree)
    return findings


def format_findings(findings: Sequence[Finding]) -> str:
    """A table: what happens to each name, where it is used, and why or how."""
    lines: list[str] = []
    for file in dict.fromkeys(finding.file for finding in findings):
        uses: dict[tuple[str, Name], list[int]] = {}
        for finding in findings:
            if finding.file == file:
                uses.setdefault((finding.name, finding.meaning), []).append(finding.line)
        lines.append(f"{file}:")
        for fate in reversed(Fate):
            for (name, meaning), numbers in sorted(uses.items()):
                if meaning.fate is fate:
                    where = ", ".join(str(number) for number in numbers)
                    text = f": {meaning.text}" if meaning.text else ""
                    lines.append(f"  {fate:13} {name} (line {where}){text}")
    names = {finding.name for finding in findings}
    refused = {finding.name for finding in findings if finding.is_refused}
    lines.append(f"{len(names)} names of SMP and CUDA, {len(refused)} of them not supported")
    return "\n".join(lines)


def _files_beside(folder: Path, own_folder: Path, tree: ast.AST) -> Iterator[Path]:
    """Files of modules that a file imports: below the script's folder, or relative to its own."""
    for node in ast.walk(tree):
        start = folder
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            head = f"{node.module}." if node.module else ""
            modules = [head.removesuffix("."), *(f"{head}{alias.name}" for alias in node.names)]
            if node.level:
                start = (own_folder / "_").parents[node.level - 1]
        else:
            continue
        for module in modules:
            path = start.joinpath(*module.split("."))
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate


class _Reader(ast.NodeVisitor):
    """Collects the uses of names in one file."""

    def __init__(self, file: Path):
        self._file = file
        self._imported: dict[str, str] = {}
        """Name in the file -> dotted path of what it stands for."""
        self._used: set[int] = set()
        """Nodes of names that were noted as used."""
        self._caught: set[int] = set()
        """Imports whose failure the script expects."""
        self.findings: list[Finding] = []

    def read(self, tree: ast.AST) -> None:
        """Reads a file. Functions may use what is imported below them, so imports come first."""
        self._caught = _caught_imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        self.visit(tree)

    def _add(self, node: ast.AST, name: str, meaning: Name) -> None:
        self.findings.append(Finding(self._file, getattr(node, "lineno", 0), name, meaning))

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            head = alias.name.split(".")[0]
            self._imported[alias.asname or head] = alias.name if alias.asname else head
            self._note(node, alias.name)

    def _import_from(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.level:
                continue  # a file of the script's own
            if alias.name == "*" and node.module is not None:
                self._import_all(node, node.module)
                continue
            path = f"{node.module}.{alias.name}"
            self._imported[alias.asname or alias.name] = path
            self._note(node, path)

    def _import_all(self, node: ast.AST, module: str) -> None:
        """`from module import *`: later uses of the module's names are its own."""
        below = (module + ".").removeprefix(f"{SMP_PACKAGE}.").removesuffix(".")
        if below not in SMP_MODULES or not module.startswith(SMP_PACKAGE):
            return
        self._add(node, f"smp.{below}.*" if below else "smp.*", Name(Fate.SUPPORTED, "a module"))
        for name in SMP_MODULES[below]:
            self._imported[name] = f"{module}.{name}"

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._imported:
            self._note(node, self._imported[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None:
            self._note(node, path)
            return
        owner = _name_of(node.value)
        if node.attr in METHODS and _may_be_wrapped(node.attr, owner):
            self._add(node, f".{node.attr}", METHODS[node.attr])
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self._use(base)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        if any(_is_device_text(side) for side in sides) and any(
            _is_cuda_text(part) for side in sides for part in getattr(side, "elts", [side])
        ):
            self._add(node, '.type == "cuda"', IS_CUDA_TYPE)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._path(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) and not called else None
        if method == "cuda":
            self._add(node, ".cuda()", _ON_DEVICE)
        elif method == "to" and any(_is_cuda_text(a) or _is_index(a) for a in node.args):
            self._add(node, '.to("cuda")', _ON_DEVICE)
        elif called == "torch.device" and any(_is_cuda_text(a) for a in node.args):
            self._add(node, 'torch.device("cuda")', _ON_DEVICE)
        elif method == "startswith" and isinstance(node.func, ast.Attribute):
            if _is_device_text(node.func.value) and any(_is_cuda_text(a) for a in node.args):
                self._add(node, '.type == "cuda"', IS_CUDA_TYPE)
        for keyword in node.keywords:
            is_place = keyword.arg in ("device", "map_location", "device_type")
            if is_place and _is_cuda_text(keyword.value):
                self._add(node, f'{keyword.arg}="cuda"', _ON_DEVICE)
        self._use(node.func)
        self.generic_visit(node)

    def _use(self, node: ast.AST) -> None:
        """Notes a name of SMP that is called or derived from."""
        below = _below(self._path(node) or "")
        if below and smp_name(below).fate is Fate.REFUSED:
            self._add(node, f"smp.{below}", smp_name(below))
            self._used.add(id(node))

    def _path(self, node: ast.AST) -> str | None:
        """Dotted path that an expression `a.b.c` stands for, if `a` was imported."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._imported:
            return None
        return ".".join([self._imported[node.id], *reversed(names)])

    def _note(self, node: ast.AST, path: str) -> None:
        """Adds a use of a dotted path if it is one of SMP or CUDA."""
        below = _below(path)
        if below:
            meaning = smp_name(below)
            # Python itself refuses an attribute that is not there.
            is_missing = meaning is UNKNOWN and isinstance(node, ast.Attribute)
            if meaning.fate is Fate.REFUSED and not is_missing:
                meaning = Name(Fate.SUPPORTED, _MENTIONED)
            if id(node) not in self._used:
                self._add(node, f"smp.{below}", meaning)
            return
        if path.startswith("torch.cuda."):
            self._add(node, path, cuda_name(path.removeprefix("torch.cuda.")))
        elif path.startswith(("torch.backends.cuda.", "torch.backends.cudnn.")):
            self._add(node, path, BACKEND_FLAG)
        elif path.startswith("smdistributed.") and not f"{SMP_PACKAGE}.".startswith(f"{path}."):
            if path != "smdistributed.modelparallel.__version__":
                is_there = _is_installed(path)
                missing = _EXPECTED if id(node) in self._caught else _OTHER_PACKAGE
                self._add(node, path, _INSTALLED if is_there else missing)


def _below(path: str) -> str | None:
    """`nn.DistributedLinear` for a dotted path in SMP's package or in mpxla."""
    for package in (SMP_PACKAGE, "mpxla"):
        if path.startswith(f"{package}."):
            return path.removeprefix(f"{package}.")
    return None


def _caught_imports(tree: ast.AST) -> set[int]:
    """Identities of import statements whose failure the script expects."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            for statement in node.body:
                found |= {
                    id(n) for n in ast.walk(statement) if isinstance(n, ast.Import | ast.ImportFrom)
                }
    return found


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = getattr(handler.type, "elts", [handler.type])
    return any(kind is None or getattr(kind, "id", "") in _CATCHES_IMPORTS for kind in kinds)


def _is_installed(path: str) -> bool:
    """Whether a package below `smdistributed` is there, or the one that a name belongs to."""
    places: Sequence[str] | None = None
    for length in range(1, 3):
        name = ".".join(path.split(".")[:length])
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return False
        places = list(spec.submodule_search_locations or ())
    return True


def _name_of(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _may_be_wrapped(method: str, owner: str) -> bool:
    """Whether an expression may be a model or an optimizer, going by its name.

    `args.loss_scale` and its like are settings of the script.
    """
    if method in _COMMON_WORDS:
        return "opt" in owner.lower() and "option" not in owner.lower()
    return not any(
        part in owner.lower()
        for part in ("arg", "conf", "cfg", "hp", "param", "flag", "setting", "option")
    )


def _is_cuda_text(node: ast.AST) -> bool:
    """Whether an expression is the text "cuda" or "cuda:...", or may become it."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.split(":")[0] == "cuda"
    if isinstance(node, ast.JoinedStr):
        return bool(node.values) and _is_cuda_text(node.values[0])
    if isinstance(node, ast.IfExp):
        return _is_cuda_text(node.body) or _is_cuda_text(node.orelse)
    return False


def _is_device_text(node: ast.AST) -> bool:
    """Whether an expression is the text of a device: `x.type`, `str(device)`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "type"
    if not isinstance(node, ast.Call) or getattr(node.func, "id", None) != "str":
        return False
    return any("device" in getattr(a, "attr", getattr(a, "id", "")) for a in node.args)


def _is_index(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
