"""Which modules a stage has, in few words: ``tok, pos, blocks.0-3, blocks.4.attn``.

A module is named at the highest level at which one stage has all of it, and numbered siblings are
joined to ranges. This module must not know costs or ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from mpxla.graph.partition.words import GraphNode, NodeKind, Partition

__all__ = ["PART_MARK", "STEP_FUNCTION", "common_path", "joined_path", "parents", "stage_modules"]

PART_MARK = "*"
"""Behind a module of which a stage has only some operations."""
STEP_FUNCTION = "(step)"
"""The user's code outside of the model."""

Path = tuple[str, ...]


def stage_modules(nodes: Sequence[GraphNode], partition: Partition) -> list[tuple[str, ...]]:
    """Name the modules of every stage, without the path that all modules have in common.

    Names are compressed and in program order; step inputs and copied nodes are left out.
    """
    stages: dict[Path, set[int]] = defaultdict(set)
    own_stages: dict[Path, set[int]] = defaultdict(set)
    children: dict[Path, dict[Path, None]] = defaultdict(dict)
    for index, node in enumerate(nodes):
        if node.kind is NodeKind.INPUT or index in partition.replicas:
            continue
        stage = partition.stage[index]
        path = _parts(node.module_path)
        own_stages[path].add(stage)
        for length in range(len(path) + 1):
            stages[path[:length]].add(stage)
            if length:
                children[path[: length - 1]][path[:length]] = None
    hidden = _shared([path for path in own_stages if path])

    def named(path: Path, stage: int) -> list[Path]:
        """Modules of the stage below a path of which it has only a part."""
        found = []
        for child in children[path]:
            if stages[child] == {stage} and len(child) > len(hidden):
                found.append(child)
            elif stage in stages[child]:
                found.extend(named(child, stage))
        if not found and path and stage in own_stages[path]:
            is_whole = stages[path] == {stage}
            found.append((*path[:-1], path[-1] + ("" if is_whole else PART_MARK)))
        return found

    names = []
    for stage in range(partition.num_stages):
        shown = [path[len(hidden) :] or path for path in named((), stage)]
        outside = [STEP_FUNCTION] if stage in own_stages[()] else []
        names.append((*_joined_ranges(shown), *outside))
    return names


def common_path(*paths: str) -> Path:
    """The leading names that dotted paths share; an empty path shares none."""
    return _shared([_parts(path) for path in paths])


def joined_path(path: str, name: str) -> str:
    """The path of something inside a module; one of both may be empty."""
    return f"{path}.{name}" if path and name else path or name


def parents(path: str) -> list[str]:
    """The modules around a module or a parameter, innermost first: a.b.weight -> a.b, a."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _parts(path: str) -> Path:
    return tuple(path.split(".")) if path else ()


def _shared(paths: Sequence[Path]) -> Path:
    columns = zip(*paths, strict=False)
    return tuple(column[0] for column in takewhile(lambda names: len(set(names)) == 1, columns))


def _joined_ranges(paths: Iterable[Path]) -> list[str]:
    """Dotted names, with consecutive numbers below one parent as ``parent.first-last``."""
    rows: dict[Path, list[int]] = {}
    last_of: dict[Path, Path] = {}  # parent -> key of its latest row
    for path in paths:
        parent, name = path[:-1], path[-1]
        if not name.isdecimal():
            rows[path] = []
            continue
        latest = last_of.get(parent)
        if latest is not None and rows[latest][-1] + 1 == int(name):
            rows[latest].append(int(name))
        else:
            rows[path], last_of[parent] = [int(name)], path
    return [
        ".".join(path) + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
        for path, numbers in rows.items()
    ]
