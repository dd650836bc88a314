"""Where SMP's scripts find what takes the place of functions of torch."""
