"""Stands for a script's file of settings, in the tests of values outside of steps."""

ALPHA = 1.0
TABLE = {"alpha": 1.0}


def shifted(y):
    return y + ALPHA
