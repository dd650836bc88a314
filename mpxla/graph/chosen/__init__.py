"""Rows that masks of a step choose, as values of a fixed size in which some rows count."""
