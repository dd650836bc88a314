"""trace"""


def add_parser(c):
    pass
