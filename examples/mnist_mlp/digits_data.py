"""Handwritten digits for the three training scripts of this folder.

Default: the 1797 real 8x8 digits that scikit-learn bundles, so that nothing is downloaded. With a
folder: the four MNIST files in the IDX format (yann.lecun.com/exdb/mnist), gzipped or not. Knows
nothing of devices, ranks or models.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10
NUM_BUNDLED_TEST_SAMPLES = 320
"""How many of the bundled digits are held out; five batches of 64 leave none of them over."""

IDX_UNSIGNED_BYTE = 0x08


class Digits(NamedTuple):
    """One data set: images [N, pixels] float32 in 0..1 and labels [N] int64, split in two."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def read_idx(path: Path) -> np.ndarray:
    """Reads one IDX file of unsigned bytes; a name that ends in ``.gz`` is decompressed.

    The format is four bytes ``0 0 dtype rank``, ``rank`` big-endian 32-bit sizes, then the values.

    Raises:
        ValueError: The file is not in this format, holds another type, or has the wrong length.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error}); fetch it again") from error
    if len(content) < 4 or content[:2] != b"\0\0":
        hint = "; rename it to end in .gz" if content[:2] == b"\x1f\x8b" else ""
        raise ValueError(f"{path}: not an IDX file, it starts with {content[:4].hex(' ')}{hint}")
    dtype, rank = content[2], content[3]
    if dtype != IDX_UNSIGNED_BYTE:
        raise ValueError(f"{path}: IDX type {dtype:#04x}, expected 0x08 (unsigned bytes)")
    header_size = 4 + 4 * rank
    if len(content) < header_size:
        raise ValueError(f"{path}: the file ends inside its header of {header_size} bytes")
    shape = tuple(np.frombuffer(content, ">u4", rank, offset=4).tolist())
    if len(content) - header_size != math.prod(shape):
        raise ValueError(
            f"{path}: the header announces {shape} = {math.prod(shape)} values, the file holds "
            f"{len(content) - header_size}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def find_idx(data_dir: Path, name: str) -> Path:
    """Returns the path of an MNIST file under any of the names that it is distributed with."""
    dotted = name.replace("-idx", ".idx")
    candidates = [name, f"{name}.gz", dotted, f"{dotted}.gz"]
    for candidate in candidates:
        if (data_dir / candidate).is_file():
            return data_dir / candidate
    raise FileNotFoundError(f"{data_dir} holds none of {', '.join(candidates)}")


def read_mnist_split(data_dir: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the images and labels of ``split`` ("train" or "t10k") from IDX files."""
    images_path = find_idx(data_dir, f"{split}-images-idx3-ubyte")
    labels_path = find_idx(data_dir, f"{split}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"images of shape {images.shape} ({images_path}) do not belong to labels of shape "
            f"{labels.shape} ({labels_path}); expected [N, height, width] and [N]"
        )
    if labels.max(initial=0) >= NUM_CLASSES:
        raise ValueError(f"{labels_path}: label {labels.max()} is not a digit from 0 to 9")
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def load_digits(data_dir: Path | None = None) -> Digits:
    """Returns MNIST from the IDX files in ``data_dir``, or else the bundled digits."""
    if data_dir is not None:
        return Digits(*read_mnist_split(data_dir, "train"), *read_mnist_split(data_dir, "t10k"))
    from sklearn.datasets import load_digits as load_bundled_digits

    images, labels = load_bundled_digits(return_X_y=True)
    # Neighbours in the file come from one writer: the fixed shuffle mixes writers into both parts.
    order = np.random.RandomState(0).permutation(len(images))
    pixels = torch.from_numpy(images[order].astype(np.float32) / 16)
    classes = torch.from_numpy(labels[order].astype(np.int64))
    test = slice(0, NUM_BUNDLED_TEST_SAMPLES)
    train = slice(NUM_BUNDLED_TEST_SAMPLES, None)
    return Digits(pixels[train], classes[train], pixels[test], classes[test])


def make_loaders(digits: Digits, batch_size: int, seed: int) -> tuple[DataLoader, DataLoader]:
    """Returns the training loader, shuffled from ``seed`` alone, and the test loader.

    Incomplete batches are dropped: a short last batch would be a new shape, for which XLA compiles
    anew, and need not be divisible by the number of microbatches.
    """
    for split, size in (("training", len(digits.train_labels)), ("test", len(digits.test_labels))):
        if not 1 <= batch_size <= size:
            raise ValueError(f"batch size {batch_size}, but there are {size} {split} samples")
    train = TensorDataset(digits.train_images, digits.train_labels)
    test = TensorDataset(digits.test_images, digits.test_labels)
    order = torch.Generator().manual_seed(seed)
    train_loader = DataLoader(train, batch_size, shuffle=True, generator=order, drop_last=True)
    return train_loader, DataLoader(test, batch_size, drop_last=True)
