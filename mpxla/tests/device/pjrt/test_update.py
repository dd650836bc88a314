"""The optimizer's update as a program of jax."""

import pytest
import torch

from mpxla.device.pjrt import executable
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.parallel.updates.update import CompiledUpdate

pytestmark = pytest.mark.unit


def test_results_take_the_memory_of_what_they_replace(monkeypatch):
    """Each its own: XLA would have to copy what lies where another result goes."""
    texts = []

    class Recorded(executable.PjrtExecutable):
        def __init__(self, name, call, *rest):
            texts.append(call.as_text())
            super().__init__(name, call, *rest)

    monkeypatch.setattr(executable, "PjrtExecutable", Recorded)
    parameters = [torch.nn.Parameter(torch.randn(32, 16)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    plain = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    reference = torch.optim.AdamW(plain)
    update = CompiledUpdate(optimizer, PjrtBackend("cpu"))
    for _ in range(3):
        for p, q in zip(parameters, plain, strict=True):
            p.grad = torch.randn(32, 16)
            q.grad = p.grad.clone()
        update.step()
        reference.step()
    assert update.was_compiled
    for p, q in zip(parameters, plain, strict=True):
        torch.testing.assert_close(p, q)
    assert "may-alias" in texts[-1] and "[32,16]{1,0} copy(" not in texts[-1]
