"""The launcher's options as configuration, and as variables that tell SMP and transformers of it.

This module must import neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpxla.compat import CompatError
from mpxla.env import read_environment, set_variables

__all__ = ["Pipeline", "configure", "trainer_variables"]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the launcher's options ask for."""

    stages: int | None = None
    """Stages of the pipeline; None for as many as there are processes in a replica."""
    microbatches: int | None = None
    """Microbatches of every batch; None for one per stage."""
    replicas: int | None = None
    """Replicas of the model; None for as many as the processes make."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the configuration."""

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> "Pipeline":
        """Reads `--stages`, `--microbatches`, `--replicas` (numbers) and `--config` (JSON).

        Raises:
            CompatError: a value cannot be read.
        """
        numbers = {
            name: _number(name, options[name])
            for name in ("stages", "microbatches", "replicas")
            if name in options
        }
        return cls(**numbers, config=_config(options.get("config")))

    def configuration(self, num_processes: int) -> dict[str, Any]:
        """The configuration for a number of processes.

        Raises:
            CompatError: the numbers do not fit.
        """
        stages = self.stages or num_processes // (self.replicas or num_processes)
        replicas = self.replicas or num_processes // stages
        if self.stages is None and self.replicas is None:
            stages, replicas = num_processes, 1
        if stages * replicas != num_processes or not replicas:
            raise CompatError(
                f"{num_processes} processes are not {max(stages, 1)} stages x {max(replicas, 1)} "
                f"replicas. Start {max(stages, 1) * max(replicas, 1)} processes (torchrun "
                f"--nproc_per_node), or change --stages or --replicas."
            )
        own = {"partitions": stages, "microbatches": self.microbatches or stages}
        return {**own, "ddp": replicas > 1, **self.config}


def trainer_variables(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Variables that make transformers see SMP, and not torch_xla, which it would use by itself."""
    return {
        "SM_HP_MP_PARAMETERS": json.dumps(configuration),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
        "USE_TORCH_XLA": "0",
    }


def configure(keys: Mapping[str, Any]) -> None:
    """Adds keys to the configuration in `MPXLA_CONFIG`, for this process and those it starts."""
    before = read_environment().mpxla_config or {}
    set_variables({"MPXLA_CONFIG": json.dumps({**before, **keys})})


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise CompatError(f"--{name} is {text!r}; give a number from 1.")
    return int(text)


def _config(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CompatError(
            f"--config {text!r} cannot be read ({error}); give a JSON object, or the path of a "
            f"file that holds one."
        ) from error
    if not isinstance(found, dict):
        raise CompatError(f"--config holds {found!r}; give a JSON object.")
    return found
