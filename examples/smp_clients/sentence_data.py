"""Short reviews with a label each, as dictionaries of padded token ids."""

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

_SUBJECTS = ("the film", "this book", "our meal", "that concert", "his talk", "the game")
_WORDS = {0: ("bad", "dull", "poor", "weak"), 1: ("good", "great", "fine", "superb")}
_FILLERS = ("", "really", "rather", "in the end", "to me")
_VOCABULARY = sorted(
    {word for text in (*_SUBJECTS, *_FILLERS, "was") for word in text.split()}
    | {word for words in _WORDS.values() for word in words}
)
VOCABULARY_SIZE = 4 + len(_VOCABULARY)
LENGTH = 12


class Reviews(Dataset):
    """Every combination of the words."""

    def __init__(self, is_test):
        texts = [
            (f"{subject} was {filler} {word} {ending}", label)
            for subject in _SUBJECTS
            for filler in _FILLERS
            for ending in _FILLERS
            for label, words in _WORDS.items()
            for word in words
        ]
        self.texts = [text for number, text in enumerate(texts) if (number % 9 == 0) == is_test]

    def __len__(self):
        """Number of reviews."""
        return len(self.texts)

    def __getitem__(self, index):
        """What a tokenizer gives: ids and mask, int64 [LENGTH], and the label."""
        text, label = self.texts[index]
        ids = [1, *(4 + _VOCABULARY.index(word) for word in text.split()), 2]
        padding = [0] * (LENGTH - len(ids))
        return {
            "input_ids": torch.tensor(ids + padding),
            "attention_mask": torch.tensor([1] * len(ids) + padding),
            "labels": torch.tensor(label),
        }


def make_loader(is_test, batch_size, num_replicas=1, replica=0):
    """A loader of this replica's part of batches of `batch_size` reviews in all."""
    dataset = Reviews(is_test)
    sampler = DistributedSampler(
        dataset, num_replicas, replica, shuffle=not is_test, seed=3, drop_last=True
    )
    return DataLoader(dataset, batch_size // num_replicas, sampler=sampler, drop_last=True)
