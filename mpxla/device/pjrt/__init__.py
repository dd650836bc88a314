"""The PJRT backend: ATen graphs become jax functions, which `jax.jit` compiles.

    dtypes.py       dtypes of both sides, and PyTorch's rules of promotion
    table.py        operator -> jax function; filled by the files of operators/
    graphs.py       a module -> a flat graph of operators that the table has -> a jax function
    executable.py   compiles such a function ahead of time, and calls it
    arrays.py       host tensors <-> jax arrays
    collectives.py  programs between CPU processes, and collectives inside programs
    memory.py       errors of full memory
    cache.py        compiled programs on disk
    backend.py      the backend itself

Nothing here knows ranks, stages or schedules.
"""
