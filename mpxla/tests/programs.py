"""What tests read of compiled programs: their texts, and which operators run on the host."""

import contextlib
import sys

import pytest

from mpxla.stage.host import HostRunner

__all__ = ["host_operators", "texts_of_programs", "traced_text"]


@contextlib.contextmanager
def texts_of_programs():
    """A list of what is compiled meanwhile: StableHLO of jax's programs, HLO of torch_xla's."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        if jax := sys.modules.get("jax"):
            compiled = jax.stages.Lowered.compile

            def compile_noting(lowered, *args):
                texts.append(lowered.as_text())
                return compiled(lowered, *args)

            patch.setattr(jax.stages.Lowered, "compile", compile_noting)
        if torch_xla := sys.modules.get("mpxla.device.torch_xla.compile"):
            is_another = torch_xla._is_another

            def compare_noting(graph_hash, text):
                texts.append(text)
                return is_another(graph_hash, text)

            patch.setattr(torch_xla, "_is_another", compare_noting)
        yield texts


def traced_text(executable):
    """StableHLO of a `FusedExecutable`, as torch_xla traces it."""
    import torch_xla.core.xla_model as xm

    from mpxla.device.torch_xla.collectives.programs import trace

    return xm.get_stablehlo(trace(executable._program).outputs)


def host_operators(executable):
    """Names of a program's operators that run on the host."""
    runners = getattr(executable, "_runners", ())
    return tuple(sorted({n for r in runners if isinstance(r, HostRunner) for n in r.operators}))
