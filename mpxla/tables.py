"""Aligned columns of text."""

from collections.abc import Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]], *, is_left: bool = False) -> list[str]:
    """Lines of a table with right-aligned or left-aligned columns, indented by two blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.ljust if is_left else str.rjust
    cells = ["  ".join(map(align, row, widths)) for row in rows]
    return [f"  {line.rstrip() if is_left else line}" for line in cells]
