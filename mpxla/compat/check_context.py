"""What the surroundings of a use say about it, for `--check`: conditions, `try`, variables.

This module must not import torch.
"""

import ast
from collections.abc import Sequence

__all__ = ["caught_imports", "unlikely_uses"]

# Feature, as `names.py` writes it -> parts of names in a condition that asks whether it is on.
_SWITCHES = {
    "tensor parallelism": ("tensor_parallel", "tp_size", "tp_degree"),
}
_CATCHES_IMPORTS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def unlikely_uses(tree: ast.AST) -> dict[int, str]:
    """Nodes that run only where a condition of the script asks for a feature.

    Returns:
        Identity of a node -> the feature.
    """
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            chosen = node.orelse if _is_negated(node.test) else node.body
            parts = chosen if isinstance(chosen, list) else [chosen]
            found |= _all_within(parts, _asked_for(node.test))
        elif isinstance(node, ast.BoolOp):
            for place, test in enumerate(node.values):
                if isinstance(node.op, ast.Or) == _is_negated(test):
                    found |= _all_within(node.values[place + 1 :], _asked_for(test))
    return found


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _all_within(parts: Sequence[ast.AST], feature: str | None) -> dict[int, str]:
    if feature is None:
        return {}
    return {id(inner): feature for part in parts for inner in ast.walk(part)}


def _asked_for(test: ast.expr) -> str | None:
    names = [
        getattr(part, "attr", getattr(part, "id", getattr(part, "value", "")))
        for part in ast.walk(test)
    ]
    text = " ".join(name.lower() for name in names if isinstance(name, str))
    for feature, words in _SWITCHES.items():
        if any(word in text for word in words):
            return feature
    return None


def caught_imports(tree: ast.AST) -> set[int]:
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
