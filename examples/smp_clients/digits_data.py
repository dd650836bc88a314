"""Handwritten digits of scikit-learn, in batches that are shared out over replicas."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_loaders(batch_size, num_replicas=1, replica=0, num_samples=1024, seed=1):
    """Returns loaders of images [N, 1, 8, 8] and labels [N] for training and for testing.

    A batch of all replicas together has `batch_size` samples, and is the same batch for any number
    of replicas. Every replica tests on all of the 256 test samples.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train = TensorDataset(images[256 : 256 + num_samples], labels[256 : 256 + num_samples])
    test = TensorDataset(images[:256], labels[:256])
    sampler = DistributedSampler(train, num_replicas, replica, seed=seed, drop_last=True)
    train_loader = DataLoader(train, batch_size // num_replicas, sampler=sampler, drop_last=True)
    return train_loader, DataLoader(test, 64, drop_last=True)
