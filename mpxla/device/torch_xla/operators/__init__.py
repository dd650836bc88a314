"""Operators that torch_xla 2.9 lacks or gets wrong, and passes for the speed of XLA on the CPU."""
