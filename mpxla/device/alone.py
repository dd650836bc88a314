"""What a backend answers where nothing pends, nothing is counted, and nobody else is reached."""

from collections.abc import Callable
from typing import Any

from mpxla.kept import Kept

__all__ = ["Alone"]


class Alone:
    """A part of `Backend`: that of one whose values are always there, on the host."""

    machine = "host"

    def keep_programs(self, kept: Kept) -> bool:
        """There is nothing to keep."""
        return False

    def flush(self) -> None:
        """Nothing is ever pending."""

    def wait(self) -> None:
        """Nothing is ever under way."""

    def random_state(self) -> int:
        """There is no generator but PyTorch's."""
        return 0

    def set_random_state(self, state: int) -> None:
        """There is no generator but PyTorch's."""

    def memory_counters(self) -> dict[str, int] | None:
        """Nothing is counted."""
        return None

    def reaches(self, world_size: int) -> bool:
        """Whether there is nobody else."""
        return world_size == 1

    def tell_rank(self, *_: Any) -> Callable[[], None]:
        """There is no runtime that asks."""
        return lambda: None

    def join_world(self, *_: Any) -> Callable[[], None]:
        """Nothing to do: the user's tensors are ordinary ones, which torch.distributed knows."""
        return lambda: None
