"""The partition decision of a job in a file: the keys `partition_file` and `load_partition`.

The decision is the one of the first step function, which places the parameters; later ones follow
it. Global rank 0 writes the file, and every rank reads it. The settings that led to the decision
(schedule, microbatches in flight, `memory_weight`) are in the file for people to see: a decision is
followed under other ones too, with a warning.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpxla.config import Config
from mpxla.errors import PartitionError
from mpxla.graph.cost import PartitionProblem
from mpxla.graph.partition.file import load_partition, save_partition
from mpxla.graph.partition.words import Partition
from mpxla.log import get_logger

__all__ = ["cut_settings", "read_decision", "write_decision"]

_CUT_SETTINGS = (
    *("pipeline_parallel_degree", "virtual_pipeline_degree", "pipeline", "schedule"),
    *("microbatches", "active_microbatches"),
    *("auto_partition", "default_partition", "memory_weight"),
)


def cut_settings(config: Config) -> dict[str, Any]:
    """The configuration keys that decide how a model is cut, and their values."""
    values = config.as_dict()
    return {key: values[key] for key in _CUT_SETTINGS}


def read_decision(config: Config, problem: PartitionProblem) -> Partition:
    """The partition that `partition_file` holds for this step.

    Raises:
        PartitionError: the file cannot be read, or was written for another step or job.
    """
    assert config.partition_file is not None, "the configuration's rules see to it"
    path = Path(config.partition_file)
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise PartitionError(
            f"load_partition: {path} cannot be read on this rank: {error.strerror}. Run once with "
            f"load_partition: False to write it, where all ranks can read it."
        ) from error
    except ValueError as error:
        raise PartitionError(
            f"load_partition: {path} is not JSON ({error}). Run once with load_partition: False to "
            f"write it again."
        ) from error
    try:
        partition = load_partition(data, problem.nodes)
    except PartitionError as error:
        error.add_note(f"mpxla: while loading {path} (partition_file).")
        raise
    degree = config.pipeline_parallel_degree
    if partition.num_ranks != degree:
        raise PartitionError(
            f"load_partition: {path} was written for pipeline_parallel_degree "
            f"{partition.num_ranks}, and this job has {degree}. Run once with load_partition: "
            f"False to write it again."
        )
    _note_other_settings(config, path, data.get("settings", {}))
    return partition


def write_decision(config: Config, problem: PartitionProblem, partition: Partition) -> None:
    """Writes the partition to `partition_file`; a reader never sees a part of it.

    Raises:
        PartitionError: the file cannot be written.
    """
    assert config.partition_file is not None, "called where there is one"
    path = Path(config.partition_file)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        decision = save_partition(partition, problem.nodes) | {"settings": cut_settings(config)}
        scratch.write_text(json.dumps(decision, indent=1))
        scratch.replace(path)
    except OSError as error:
        raise PartitionError(
            f"partition_file: {path} cannot be written: {error.strerror}. Choose a file in a "
            f"folder that exists."
        ) from error


def _note_other_settings(config: Config, path: Path, written: Mapping[str, Any]) -> None:
    """A decision is followed under any schedule; whoever changes it should know."""
    other = [
        f"{key} was {written[key]!r} and is {value!r}"
        for key, value in cut_settings(config).items()
        if key in written and written[key] != value
    ]
    if other:
        get_logger().warning(
            "load_partition: %s was decided under other settings (%s) and is followed as it is. "
            "Run once with load_partition: False to decide again.",
            path,
            "; ".join(other),
        )
