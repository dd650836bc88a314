"""The errors that users of mpxla can meet, as one tree.

Every class docstring shows a failing use, its cause and its remedy. Texts of single errors say what
happened with values, where (rank, stage, microbatch, key, user's line) and what to do.
This module imports nothing, so that every other one may import it.
"""

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "LoweringError",
    "MpxlaError",
    "PartitionError",
    "PeerFailure",
    "RankMismatch",
    "ScheduleError",
    "StepError",
    "TopologyError",
]


class MpxlaError(RuntimeError):
    """Base of all errors raised on purpose by mpxla; also raised for calls in the wrong order.

    Example: ``smp.rank()`` before ``smp.init()``. Call ``smp.init()`` first in the script.
    """


class ConfigError(MpxlaError, ValueError):
    """A configuration key or value that cannot be used.

    Example: ``smp.init({"microbatchs": 4})``. The text lists every problem of the configuration at
    once, with the nearest valid name of an unknown key.
    """


class TopologyError(MpxlaError, ValueError):
    """Processes, degrees or rank arguments that do not fit together.

    Example: three processes with ``pipeline_parallel_degree: 2``. Start a multiple of the product
    of the degrees.
    """


class CaptureError(MpxlaError):
    """The step function could not be captured as one graph.

    Example: ``if loss > 1: ...`` inside an ``@smp.step`` function branches in Python on a tensor's
    value. Use ``torch.where``, or move the branch out of the step function.
    """


class CheckpointError(MpxlaError):
    """A checkpoint that cannot be written or read.

    Example: ``smp.resume_from_checkpoint(path)`` where a file of the checkpoint was truncated. The
    text names the file, or what differs from the model; the checkpoints that were there stay.
    """


class PartitionError(MpxlaError, ValueError):
    """The model cannot be cut into stages as asked.

    Example: ``with smp.partition(4)`` with ``pipeline_parallel_degree: 2``. Use an index below the
    degree.
    """


class ScheduleError(MpxlaError, ValueError):
    """A list of actions that deadlocks, breaks a data dependency or cannot be read.

    The text shows the rank x step grid with the failing cell marked.
    """


class LoweringError(MpxlaError):
    """An operator of a stage cannot run on the XLA device.

    Example: ``torch.linalg.eig`` in a model. The text names the operator and the module path;
    replace the operator or move it out of the step function.
    """


class StepError(MpxlaError, ValueError):
    """A call of a step function, or of the model, that cannot be carried out.

    Example: a batch of 10 samples with ``microbatches: 4``. Make the batch divisible, for instance
    with ``drop_last=True``.
    """


class PeerFailure(MpxlaError):  # noqa: N818 - named for what happened, not for its kind
    """Another rank raised, died or left while this rank needed it.

    The text names that rank and, where known, its own error, stage and microbatch. Look at that
    rank's output for the cause.

    Attributes:
        raised_by: The rank whose own error it was; None if it died, left or fell silent.
    """

    raised_by: int | None = None


class RankMismatch(MpxlaError):  # noqa: N818 - named for what happened, not for its kind
    """Ranks disagree on something that must be equal everywhere.

    Example: ranks started with different configurations or model definitions. The text shows the
    difference; start the same script with the same arguments on all ranks.
    """
