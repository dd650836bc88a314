"""The launcher's options as configuration, and as variables that tell SMP and transformers of it.

This module must import neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpxla.compat import CompatError
from mpxla.env import read_environment, set_variables

__all__ = ["configure", "pipeline_configuration", "trainer_variables"]


def pipeline_configuration(options: Mapping[str, str], num_processes: int) -> dict[str, Any]:
    """The configuration that `--stages`, `--microbatches`, `--replicas` and `--config` ask for.

    By default there is one replica, or as many as the processes make of the stages, and one
    microbatch per stage.

    Raises:
        CompatError: a value cannot be read, or the numbers do not fit.
    """
    replicas, microbatches = _number("replicas", options), _number("microbatches", options)
    stages = _number("stages", options) or num_processes // (replicas or 1)
    replicas = replicas or num_processes // stages
    if stages * replicas != num_processes or not replicas:
        raise CompatError(
            f"{num_processes} processes are not {max(stages, 1)} stages x {max(replicas, 1)} "
            f"replicas. Start {max(stages, 1) * max(replicas, 1)} processes (torchrun "
            f"--nproc_per_node), or change --stages or --replicas."
        )
    own = {"partitions": stages, "microbatches": microbatches or stages, "ddp": replicas > 1}
    return {**own, **_config(options.get("config"))}


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


def _number(name: str, options: Mapping[str, str]) -> int | None:
    text = options.get(name)
    if text is None:
        return None
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
