"""What the surroundings of a use say about it, for `--check`: conditions, `try`, variables.

This module must not import torch.
"""

import ast

__all__ = ["caught_imports", "unlikely_uses"]

# Feature, as `names.py` writes it -> parts of names in a condition that asks whether it is on.
_SWITCHES = {
    "tensor parallelism": ("tensor_parallel", "tp_size", "tp_degree"),
    "sharded data parallelism": ("sharded", "sdp", "zero"),
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
            feature = _asked_for(node.test)
            if feature is None:
                continue
            is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            chosen = node.orelse if is_negated else node.body
            for part in chosen if isinstance(chosen, list) else [chosen]:
                found |= {id(inner): feature for inner in ast.walk(part)}
    return found


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
