"""Token sequences in JSON-lines files, and loaders for pipeline ranks that need no data."""

import json

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def write_corpus(path, num_lines, length, vocabulary, seed):
    """Writes counting sequences with some noise: {"input_ids": [...], "attention_mask": [...]}."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(num_lines):
            first, stride = torch.randint(vocabulary, (2,), generator=generator).tolist()
            ids = [(first + stride * place) % vocabulary for place in range(length)]
            ids[-1] = int(torch.randint(vocabulary, (1,), generator=generator))
            record = {"input_ids": ids, "attention_mask": [1] * length}
            file.write(json.dumps(record) + "\n")


class JsonLines(Dataset):
    """One record for each line."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.records = [json.loads(line) for line in file]

    def __len__(self):
        """Number of lines."""
        return len(self.records)

    def __getitem__(self, index):
        """Token ids and attention mask, int64 [length] each."""
        record = self.records[index]
        return torch.tensor(record["input_ids"]), torch.tensor(record["attention_mask"])


class Dummies(Dataset):
    """As many empty tensors as another rank has records."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        """The number given."""
        return self.length

    def __getitem__(self, index):
        """Two tensors without elements."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)


def make_loader(dataset, batch_size, num_replicas=1, replica=0, is_shuffled=True):
    """A loader of this replica's part of batches of `batch_size` records in all."""
    sampler = DistributedSampler(
        dataset, num_replicas, replica, shuffle=is_shuffled, seed=2, drop_last=True
    )
    return DataLoader(dataset, batch_size // num_replicas, sampler=sampler, drop_last=True)
