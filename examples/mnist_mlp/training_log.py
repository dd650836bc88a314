"""What the training scripts of this folder show: a progress bar, a line per epoch, a summary.

Knows nothing of devices and ranks: a script that runs in several processes makes all but one log
silent.
"""

import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm


class TrainingLog:
    """Times the training part of every epoch and prints what came of it.

    An epoch is ``batches`` (the clock runs), ``end_training`` (it stops) and ``end_evaluation``
    (the epoch's line). On an asynchronous device the loss must have been read, as ``.item()`` does,
    before ``end_training`` is called: reading is what waits for the device.
    """

    def __init__(
        self,
        num_epochs: int,
        train_loader: DataLoader,
        test_loader: DataLoader,
        is_silent: bool = False,
    ) -> None:
        if num_epochs < 1:
            raise ValueError(f"{num_epochs} epochs asked for; at least one is needed")
        self._num_epochs = num_epochs
        self._train_loader = train_loader
        self._num_train_samples = len(train_loader) * (train_loader.batch_size or 1)
        self._num_test_samples = len(test_loader) * (test_loader.batch_size or 1)
        self._is_silent = is_silent
        # The delay hides the bar until the first step is done, and so below what is logged in it.
        self._bar = tqdm(
            total=num_epochs * len(train_loader),
            desc="training",
            unit="it",
            disable=is_silent,
            delay=1e-3,
        )
        self._epoch = 0
        self._num_skipped = 0
        self._train_loss = 0.0
        self._durations_s: list[float] = []
        self._started_s = 0.0
        self._outcome = ""

    def skip(self, num_epochs: int, num_batches: int) -> None:
        """Goes on after so many epochs, and so many batches of the next one."""
        self._epoch, self._num_skipped = num_epochs, num_batches
        self._bar.update(num_epochs * len(self._train_loader) + num_batches)

    def batches(self) -> Iterator[list[torch.Tensor]]:
        """Yields the training batches of one epoch that are left, and moves the bar after each."""
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._started_s = time.perf_counter()
        for batch in itertools.islice(self._train_loader, num_skipped, None):
            yield batch
            self._bar.update()

    def write(self, text: str) -> None:
        """Prints a text above the bar."""
        if not self._is_silent:
            tqdm.write(text)

    def end_training(self, train_loss: float) -> None:
        """Notes the mean loss of the epoch and stops its clock."""
        self._durations_s.append(time.perf_counter() - self._started_s)
        self._epoch += 1
        self._train_loss = train_loss
        self._bar.clear()

    def end_evaluation(self, test_loss: float, accuracy: float) -> None:
        """Prints the line of the epoch that just ended."""
        epoch, train_loss = self._epoch, self._train_loss
        result = f"test accuracy {100 * accuracy:.2f} %"
        self._outcome = f"final train loss {train_loss:.4f}, {result} of {self._num_test_samples}"
        self.write(
            f"epoch {epoch:{len(str(self._num_epochs))}}/{self._num_epochs}: "
            f"train loss {train_loss:.4f}, test loss {test_loss:.4f}, {result}"
        )

    def close(self) -> None:
        """Prints throughput, final loss and accuracy.

        On XLA the first epoch holds the compilation, and the second can: hence the median epoch.
        """
        self._bar.close()
        if not self._durations_s:
            return  # every epoch had been trained before
        epoch_s = statistics.median(self._durations_s)
        self.write(
            f"throughput {len(self._train_loader) / epoch_s:.1f} iterations/s, "
            f"{self._num_train_samples / epoch_s:.0f} samples/s in the median epoch of training; "
            f"the first took {self._durations_s[0]:.2f} s"
        )
        self.write(f"{self._outcome} samples")
