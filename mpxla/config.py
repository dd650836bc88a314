"""The configuration: every key with its meaning, checked once and frozen.

All problems are reported in one error. This module must not import torch, or know where values come
from (`config_sources` does) or of ranks beyond how many there are.
"""

import difflib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, NoReturn

from mpxla.config_keys import (
    ALIASES,
    PIPELINES,
    PLACEMENT_ORDERS,
    Kind,
    boolean,
    integer,
    integer_or_word,
    key,
    number,
    switch_or_word,
    text,
    word,
)
from mpxla.config_rules import REFUSED, broken
from mpxla.errors import ConfigError

__all__ = ["DEFAULTS", "KINDS", "Config", "convert", "describe_unknown", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Value of every configuration key.

    Building one checks all values and their combinations, and fills in defaults that depend on
    other keys. Keys marked "ignored" have no meaning on XLA: who sets them is warned.
    """

    pipeline_parallel_degree: int = key(1, integer(1))
    """Number of partitions of the model, one per rank of a pipeline; also spelled `partitions`."""
    microbatches: int = key(1, integer(1))
    """Number of parts that each batch is split into."""
    pipeline: str = key("interleaved", word(*PIPELINES))
    """Schedule: `interleaved` prefers ready backwards, `simple` runs all forwards first. Extension:
    `eager_1f1b` starts forwards early enough to hide transfers, `zero_bubble` splits backwards and
    fills waits with weight gradients, `zero_bubble_v` does so with two stages per rank in the shape
    of a V, `custom` runs the text in `schedule`. For steps of 20 ms and more, `pipeline`,
    `virtual_pipeline_degree`, `memory_weight` and `active_microbatches` are chosen by simulation
    where nobody sets them."""
    optimize: str = key("memory", word("memory", "speed"))
    """What tensor parallelism and the default of `memory_weight` favour."""
    placement_strategy: str = key("cluster", word(*PLACEMENT_ORDERS))
    """Order of the axes data, pipeline, tensor over global ranks (`topology`)."""
    auto_partition: bool = key(True, boolean())
    """Whether mpxla decides the partition of every module."""
    default_partition: int = key(None, integer(0, is_nullable=True))
    """Partition of modules that no `smp.partition` places; 0 if the decision is automatic."""
    memory_weight: float = key(None, number(within=(0, 1), is_nullable=True))
    """Weight of balanced memory against balanced time; by default 0.2 for `optimize: "speed"`,
    else 0.8."""
    ddp: bool = key(False, boolean())
    """Data parallelism over replicas of the model."""
    ddp_port: int | None = key(None, integer(0, is_nullable=True))
    """Ignored."""
    ddp_dist_backend: str = key("auto", text())
    """Ignored."""
    active_microbatches: int = key(None, integer(1, is_nullable=True))
    """Most microbatches in flight at a stage; by default partitions + 2 (2 x partitions with
    several stages per rank, all for `simple` and `custom`), and never above `microbatches`."""
    deterministic_server: bool = key(False, boolean())
    """Ignored."""
    tensor_parallel_degree: int = key(1, integer(1))
    """Number of ranks that share the tensors of one partition; `smp.set_tensor_parallelism` says
    what is split."""
    tensor_parallel_seed: int = key(0, integer())
    """Seed for initializing distributed modules."""
    prescaled_batch: bool = key(False, boolean())
    """Whether the ranks of a tensor-parallel group are fed the same batch. Otherwise each has
    samples of its own, as a replica has, and gets their results; together they run as many times
    `microbatches` in a step."""
    fp16_params: bool = key(False, boolean())
    """Older name of `fp16` without loss scaling: parameters and activations in float16, and masters
    as `master_dtype` says."""
    fp16: bool = key(False, boolean())
    """Parameters and activations in float16, float32 masters, and loss scaling by the settings of
    `DistributedOptimizer`."""
    bf16: bool = key(False, boolean())
    """Parameters and activations in bfloat16, and float32 masters."""
    shard_optimizer_state: bool = key(False, boolean())
    """Divide the optimizer's state over the data-parallel ranks."""
    shard_gradients: bool = key(False, boolean())
    """Extension. Divide gradients over all replicas already in every backward, and with them the
    optimizer's state (ZeRO-2); parameters stay whole. All ranks call the same step functions."""
    skip_tracing: bool = key(False, boolean())
    """Ignored."""
    offload_activations: bool = key(False, boolean())
    """Move what forwards save to host memory until shortly before their backward, beside programs;
    with checkpointed modules, that is what these still hold."""
    activation_loading_horizon: int = key(4, integer(1))
    """With `offload_activations`: how many forwards and backwards of its rank before its own
    backward a microbatch comes back. Fewer hold less on the device, more hide slower copies."""
    delayed_parameter_initialization: bool = key(False, boolean())
    """Create parameters only after partitioning, on the rank that owns them."""
    sharded_data_parallel_degree: int = key(1, integer(1))
    """Number of replicas over which parameters, gradients and optimizer state are divided: each
    rank of a group has a part of every large parameter, and gathers the rest block by block while
    it computes. It divides the number of replicas; all ranks call the same step functions."""
    sdp_reduce_bucket_size: int = key(500_000_000, integer(1, is_exponent_allowed=True))
    """Ignored."""
    sdp_param_persistence_threshold: int = key(1_000_000, integer(0, is_exponent_allowed=True))
    """Parameters with fewer elements stay whole on every rank, and so do their gradients."""
    sdp_max_live_parameters: int = key(1_000_000_000, integer(1, is_exponent_allowed=True))
    """Most elements of divided parameters that are whole at a time on a rank. Two blocks of the
    model are, one computing and the next one being gathered; where they have more elements
    together, the next one waits. A single block may have more."""
    sdp_gather: str = key("microbatch", word("microbatch", "step", "auto"))
    """Extension. How long divided parameters are whole: while a block computes, gathered again for
    every `microbatch`; or from the begin to the end of a `step`, gathered once. `auto` takes `step`
    where the whole parameters of every rank fit into its memory beside all else."""
    sdp_hierarchical_allgather: bool = key(True, boolean())
    """Where a group that holds parameters together has equally many ranks, two or more, on each of
    several hosts, gathers go across hosts first, between ranks of equal place, and then inside each
    host. Over the transport `xla` the device's collectives choose their way."""
    sdp_gradient_clipping: float = key(1.0, number(above=0))
    """With sharded data parallelism, `optimizer.step()` first clips gradients at this norm, taken
    over all ranks."""
    load_partition: bool = key(False, boolean())
    """Load the partition decision from `partition_file` instead of making one."""
    partition_file: str | None = key(None, text(is_nullable=True))
    """JSON file that keeps the partition decision: global rank 0 writes it when the first step is
    partitioned, or every rank reads it with `load_partition`."""
    contiguous: bool = key(True, boolean())
    """Ignored."""
    horovod: bool = key(False, boolean())
    """Ignored; True is refused."""
    virtual_pipeline_degree: int = key(None, integer(1, is_nullable=True))
    """Extension. Stages per rank, in turns over the ranks; 1, or 2 for `zero_bubble_v`."""
    schedule: str | None = key(None, text(is_nullable=True))
    """Extension. The text of a schedule for `pipeline: "custom"`: a line per pipeline rank with
    actions such as `0F0 0F1 0B0 0B1` (stage, operation, microbatch; `mpxla/schedule/action.py`)."""
    device: str = key("auto", word("auto", "torch_xla", "pjrt", "eager"))
    """Extension. What compiles and runs programs: `torch_xla`, or `pjrt`, which is jax on the
    device that it finds; `auto` is `pjrt` if jax is installed, but `torch_xla` where the script has
    imported that or PJRT_DEVICE names a device of it. MPXLA_DEVICE wins over it."""
    compile_cache: str | None = key(None, text(is_nullable=True))
    """Extension. Folder in which jobs keep how steps are cut, scheduled and lowered and, with
    `device: "pjrt"`, compiled programs, so that the next start of the job compiles nothing; by
    default `~/.cache/mpxla/programs`, and `""` keeps nothing. Whoever writes there can run code in
    the job."""
    device_rates: str = key("auto", word("auto", "measured", "constant"))
    """Extension. By what rates a step's costs are estimated where its cut or schedule is chosen:
    the device's, `measured` once by small programs and messages and kept in the folder of
    `compile_cache`, or `constant` ones, those of a processor's core. `auto` measures on
    accelerators: processors are near the constants, and what else they run makes measurements
    vary."""
    transport: str = key("auto", word("auto", "host", "xla"))
    """Extension. How ranks communicate: `host` goes through host memory; `xla` by collectives
    inside XLA programs, on CPU by jaxlib (extra `cpu-collectives`); `auto` takes the best one for
    the device, which is `host` on CPU."""
    reduction_dtype: str = key("same", word("same", "bfloat16", "float16"))
    """Extension. In what gradients travel between replicas: in their own type (`same`), or rounded
    to 16 bits, which halves the bytes and costs precision (2^-8, or 2^-11 and a range to 65504)."""
    master_dtype: str = key("float32", word("float32", "same"))
    """Extension. In what 16-bit parameters are updated, also those of a model that is in bfloat16
    by itself: on float32 copies (`float32`), or in their own type (`same`), which saves 4 bytes per
    parameter and half of the optimizer's state, and loses updates below half an ulp."""
    stochastic_rounding: bool = key(False, boolean())
    """Extension. Update bfloat16 parameters without float32 masters, and round what an update
    changes (parameters and the optimizer's state in bfloat16) up or down by chance, so that its
    mean is exact: alike on all replicas, and again from the same seed (`torch.manual_seed` of
    rank 0).
    `NEURON_RT_STOCHASTIC_ROUNDING_EN=1` with `master_dtype: "same"` means it too, except on Neuron,
    whose hardware rounds then."""
    stall_timeout_s: float = key(300.0, number(above=0))
    """Extension. A rank that gives no sign of life for so many seconds (its process is stopped)
    ends the job, and so do ranks that wait so long for others that make no progress, with a table
    of what every rank is doing. Progress is made by a thread or child process that uses 2 % of a
    core, or by 50 kB/s from or to files: a long evaluation, compilation or download is no stall, a
    disk or data loader that does not answer is. Give it more than the longest time for which a
    rank may sleep while others wait for it."""
    init_timeout_s: float = key(120.0, number(above=0))
    """Extension. How many seconds `smp.init` waits for ranks that have not called it."""
    activation_memory: str | int = key("keep", integer_or_word(1, "keep", "recompute"))
    """Extension. What is held between forward and backward: `keep` holds what is dear to compute
    again, `recompute` only what a stage takes in (and random masks); a number is a limit in bytes
    for all activations that a pipeline rank holds at a time, and the cheapest are computed again
    to stay below it. Checkpointed modules are computed again in any case."""
    trust_checkpoints: bool = key(False, boolean())
    """Extension. Checkpoints may hold any object: `user_content` is saved as it is, and loading
    runs what code the files ask for, unless `weights_only=True` is passed."""
    check_indices: str = key("inputs", switch_or_word("all", "off", "inputs"))
    """Extension. Ids beyond a table and labels beyond the classes are errors: `inputs` looks at
    those that follow from inputs of a step, before it runs, unless they are on an accelerator; True
    (`all`) lets the programs report all others too, which waits for every step; False is `off`."""

    log_metrics_every: int = key(0, integer(0))
    """Extension. Rank 0 logs a line with `smp.metrics()` after every so many training steps; 0 for
    none."""
    metrics_dir: str | None = key(None, text(is_nullable=True))
    """Extension. Folder in which every rank keeps a file with its `smp.metrics()` and what it does,
    for `python -m mpxla top FOLDER`; on several hosts a shared one."""

    sources: tuple[tuple[str, str], ...] = field(init=False, compare=False, repr=False)
    """Not a key: the keys that were set, each with `"launcher"` or `"init"`."""
    set_by: InitVar[Mapping[str, str] | None] = None
    """Not kept: what becomes `sources`; without it, every value off its default counts as set."""

    def __post_init__(self, set_by: Mapping[str, str] | None) -> None:
        """Checks the values and completes them.

        Args:
            set_by: Source of every key that somebody set.

        Raises:
            ConfigError: Some value or combination cannot be used. The text lists all problems.
        """
        values, problems, wrong = dict(DEFAULTS), [], set()
        for name in KINDS:
            try:
                values[name] = convert(name, getattr(self, name))
            except ValueError as error:
                problems.append(str(error))
                wrong.add(name)
        if set_by is None:
            set_by = {name: "init" for name in KINDS if values[name] != DEFAULTS[name]}
        problems += broken(REFUSED, values, set_by, wrong)
        if problems:
            refuse(problems)
        for name, value in _complete(values).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", tuple(sorted(set_by.items())))

    @property
    def partitions(self) -> int:
        """The other spelling of `pipeline_parallel_degree`."""
        return self.pipeline_parallel_degree

    @property
    def has_masters(self) -> bool:
        """Whether 16-bit parameters are updated on float32 copies."""
        return self.master_dtype == "float32" and not self.stochastic_rounding

    def as_dict(self) -> dict[str, Any]:
        """Returns the value of every key, in the order of the fields."""
        return {name: getattr(self, name) for name in KINDS}

    def source(self, name: str) -> str:
        """Returns who set a key: `"launcher"`, `"init"` or `"default"`.

        Args:
            name: The key.

        Raises:
            ConfigError: There is no such key.
        """
        if name not in KINDS:
            refuse([describe_unknown(name, "Config.source")])
        return dict(self.sources).get(name, "default")

    def describe(self) -> list[str]:
        """Returns a line `key = value (from source)` for every key that was set off its default."""
        return [
            f"{name} = {value!r} (from {self.source(name)})"
            for name, value in self.as_dict().items()
            if self.source(name) != "default" and value != DEFAULTS[name]
        ]

    def for_batches(self, count: int) -> "Config":
        """The configuration of steps to which several ranks bring their batches.

        Args:
            count: how many; their microbatches are one list then.
        """
        active = self.active_microbatches
        if active == self.microbatches:
            active *= count
        return replace(
            self,
            microbatches=count * self.microbatches,
            active_microbatches=active,
            set_by=dict(self.sources),
        )

    def sharding_degree(self, world_size: int) -> int:
        """Returns how many replicas divide gradients, and perhaps parameters, among them.

        Args:
            world_size: Number of processes.
        """
        if not self.shard_gradients:
            return self.sharded_data_parallel_degree
        return max(world_size // (self.pipeline_parallel_degree * self.tensor_parallel_degree), 1)

    def check_world_size(self, world_size: int) -> None:
        """Checks the keys that depend on how many processes there are.

        Whether the degrees divide the number of processes is left to `Topology`.

        Args:
            world_size: Number of processes.

        Raises:
            ConfigError: Several replicas without `ddp`, or a sharding degree that does not divide
                the number of replicas.
        """
        num_ranks = self.pipeline_parallel_degree * self.tensor_parallel_degree
        num_replicas, rest = divmod(world_size, num_ranks)
        if rest:
            return
        problems: list[str] = []
        if num_replicas > 1 and not self.ddp:
            problems.append(
                f"{world_size} processes hold {num_replicas} replicas of the model "
                f"(pipeline_parallel_degree {self.pipeline_parallel_degree} x "
                f"tensor_parallel_degree {self.tensor_parallel_degree} = {num_ranks} processes "
                f"each), but ddp is False (from {self.source('ddp')}), so nothing would average "
                f"their gradients; set ddp: True, or start {num_ranks} processes, or raise "
                "pipeline_parallel_degree"
            )
        if num_replicas % self.sharded_data_parallel_degree:
            problems.append(
                f"sharded_data_parallel_degree: {self.sharded_data_parallel_degree} must divide "
                f"the number of replicas, which is {num_replicas} with {world_size} processes"
            )
        if problems:
            refuse(problems)


KINDS: dict[str, Kind] = {f.name: f.metadata["kind"] for f in fields(Config) if f.metadata}
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Config) if f.metadata}


def convert(name: str, value: Any, spelling: str | None = None, origin: str | None = None) -> Any:
    """The value as stored, or a ValueError with the text for the user."""
    kind = KINDS[name]
    if value is None and kind.is_nullable:
        return None
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError):
        where = f" (from {origin})" if origin else ""
        raise ValueError(f"{spelling or name}: {value!r}{where} must be {kind.expected}") from None


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the defaults that depend on other keys."""
    complete = dict(values)
    if complete["default_partition"] is None:
        complete["default_partition"] = 0
    if complete["memory_weight"] is None:
        complete["memory_weight"] = 0.2 if complete["optimize"] == "speed" else 0.8
    if complete["virtual_pipeline_degree"] is None:
        complete["virtual_pipeline_degree"] = 2 if complete["pipeline"] == "zero_bubble_v" else 1
    degree = complete["pipeline_parallel_degree"]
    default = degree + 2
    if complete["virtual_pipeline_degree"] > 1 or complete["pipeline"] == "eager_1f1b":
        default = max(default, 2 * degree)
    if complete["pipeline"] in ("simple", "custom"):
        default = complete["microbatches"]
    active = complete["active_microbatches"] or default
    complete["active_microbatches"] = min(active, complete["microbatches"])
    return complete


def describe_unknown(name: Any, origin: str) -> str:
    """What the user reads of a key that does not exist."""
    candidates = [*KINDS, *ALIASES]
    near = difflib.get_close_matches(str(name).lower(), candidates, n=1)
    advice = (
        f"did you mean {near[0]}?"
        if near
        else "remove it; the keys are the fields of mpxla.config.Config"
    )
    return f"{name} (from {origin}) is not a configuration key; {advice}"


def refuse(problems: list[str]) -> NoReturn:
    """Raises the one error with all problems."""
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError(
        f"the configuration has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems)
    )
