"""What the surroundings of an import say about it, for `--check`.

This module must not import torch.
"""

import ast

__all__ = ["caught_imports"]

_CATCHES_IMPORTS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


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
