"""What a run has to tell: speed, share of the device's peak, and a log that outlives it.

The peak is measured and not looked up: the rate of one large matrix product, on the device and in
the type of the model's parameters. So the share says how far the whole step is from doing nothing
but matrix products.
"""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch

_SIZE = 1024
_REPETITIONS = 5


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of two [1024, 1024] matrices.

    The best of some repetitions, with the result read each time.
    """
    left, right = (torch.randn(_SIZE, _SIZE).to(device, dtype) for _ in range(2))
    durations_s = []
    for _ in range(_REPETITIONS + 1):  # the first one compiles
        started_s = time.perf_counter()
        (left @ right).cpu()
        durations_s.append(time.perf_counter() - started_s)
    return 2 * _SIZE**3 / min(durations_s[1:])


def step_operations(config: Any, num_parameters: int, num_tokens: int, length: int) -> float:
    """Floating-point operations of one training step.

    Six for each parameter that is multiplied and each token (two forward, four backward), and
    twelve for each layer, feature and position that a token attends to (Chowdhery et al., PaLM,
    appendix B). The table of the embedding is only read.
    """
    multiplied = num_parameters
    if not config.tie_word_embeddings:
        multiplied -= config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return num_tokens * (6 * multiplied + attention)


class RunLog:
    """A line on the terminal and one of JSON per step; TensorBoard's files where it is installed.

    Args:
        folder: receives `log.jsonl` and TensorBoard's files; None writes nothing.
        is_silent: on all ranks but one.
    """

    def __init__(self, folder: Path | None, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._file = self._board = None
        if is_silent or folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "log.jsonl").open("a", encoding="utf-8")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder))

    def write(self, step: int, **values: float) -> None:
        """Notes the values of a step."""
        if self._is_silent:
            return
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        print(f"step {step}: {text}", flush=True)
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
