"""The PyTorch/XLA backend: graphs are traced to XLA once, and executables called by handle.

backend.py      the backend itself
compile.py      a graph -> an executable, or several with host pieces between them
trial.py        which operators the device has no code for
tensors.py      host tensors <-> tensors of the device, pending work, versions
lowering.py     how stages are lowered for torch_xla
operators/      its decompositions, and passes for the code generator of XLA's CPU backend
collectives/    programs between processes, and what torch and torch_xla know of the job
"""
