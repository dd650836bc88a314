"""From captured step to stages: the graph, its costs, its partition and its split.

`capture/` makes the graph of a step; `python/` is about what Python does besides. `chosen/` gives
rows that masks choose a fixed size, and `tensor/` splits tensors over ranks. `partition/` finds the
stage of every node; it uses neither torch nor torch_xla. The modules pass plain data to each other.
Import the module that defines a name: nothing is re-exported here.
"""
