"""From captured step to stages: the graph, its costs, its partition and its split.

The modules of this package pass plain data to each other; the partitioner (``partition*.py``) uses
neither torch nor torch_xla. Import the module that defines a name: nothing is re-exported here.
"""
