"""A traced graph that runs again, and tells where it comes to a node."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["Replay"]


class Replay(fx.Interpreter):
    """Runs a graph without changes of gradient mode; before a node, it tells values of others."""

    def __init__(
        self,
        module: fx.GraphModule,
        at: fx.Node,
        told: Sequence[fx.Node],
        tell: Callable[[list[torch.Tensor]], None],
    ):
        super().__init__(module)
        self._at, self._told, self._tell = at, told, tell

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; the name of the argument is torch's."""
        if n is self._at:
            self._tell([self.env[node] for node in self._told])
        is_flag = n.target is torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]
        return None if is_flag else super().run_node(n)
