"""Small programs over gradients: compiled once, and not too many kept."""

import pytest
import torch

from mpxla.parallel import programs as module
from mpxla.parallel.programs import Programs
from mpxla.tests.device.null import NullBackend

pytestmark = pytest.mark.unit


def scaled(factor, value):
    return [value * factor]


def test_the_least_used_programs_are_forgotten_with_a_warning(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROGRAMS", 2)
    warned = []
    monkeypatch.setattr(module, "warn_once", lambda key, text: warned.append(text))
    backend = NullBackend()
    programs = Programs(backend)
    arguments = backend.put([torch.ones(2)])
    for factor in (1.0, 2.0, 1.0):
        programs.run("scaling", scaled, (factor,), arguments)
    assert backend.num_compilations == 2 and not warned
    programs.run("scaling", scaled, (3.0,), arguments)  # 2.0 goes, 1.0 was used since
    assert len(warned) == 1 and "for scaling" in warned[0]
    programs.run("scaling", scaled, (1.0,), arguments)
    assert backend.num_compilations == 3
    programs.run("scaling", scaled, (2.0,), arguments)
    assert backend.num_compilations == 4
