"""Steps whose tensors are split over ranks: which dims, what is summed, and where ranks differ."""
