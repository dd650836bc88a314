"""What runs programs: a backend, chosen once per process when a session begins.

A backend compiles graphs to executables, moves tensors to its device and back, and says how stages
are lowered for it. Everything that imports torch_xla or jax is in the folder of its backend (what
both use of jaxlib is in cpu_world.py); the rest of mpxla has a `Backend` handed down, and treats
what executables take and give as opaque.

    backend.py      the protocols, and what a backend wants of graphs
    choice.py       which backend a process uses
    cpu_world.py    devices of CPU processes that reach each other, for both backends; relay.py
    fused.py        stage programs with collectives inside, for both
    messages.py     what the small programs of the `xla` transport compute, for both
    torch_xla/      PyTorch/XLA
    pjrt/           any plugin of jax's
"""
