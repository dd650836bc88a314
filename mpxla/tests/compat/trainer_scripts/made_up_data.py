"""Small data sets with something to learn, made on the spot."""

import torch


class Rows(torch.utils.data.Dataset):
    """A data set of dictionaries."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def sentences(count, seed, vocabulary=40, shortest=6, longest=6):
    """Token ids from 3 on, of several lengths."""
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=source).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=source).tolist() for n in lengths]
