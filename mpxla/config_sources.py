"""Where configuration comes from: the launcher, the script and the defaults, merged and logged.

Values come from the launcher (`SM_HP_MP_PARAMETERS`, then `MPXLA_CONFIG`), from the dict given to
`smp.init`, from variables of torch_xla and Neuron, and from defaults, in this order of priority.
All problems of all sources are reported in one error. This module must not read the environment.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpxla.config import DEFAULTS, KINDS, Config, convert, describe_unknown, refuse
from mpxla.config_keys import ALIASES, IGNORED_KEYS
from mpxla.config_rules import IDLE, REFUSED, broken
from mpxla.env import ROUNDING_VARIABLE, LaunchEnv
from mpxla.log import get_logger

__all__ = ["resolve"]


class _Layer(NamedTuple):
    """The keys that one source sets, canonical and converted."""

    origin: str
    source: str
    values: dict[str, Any]


def resolve(user: Mapping[str, Any] | None, env: LaunchEnv) -> Config:
    """Merges all sources of configuration, checks the result and logs it on rank 0.

    Args:
        user: Dict given to `smp.init`, or None.
        env: Holds the launcher's configuration, which wins over `user`.

    Returns:
        The configuration.

    Raises:
        ConfigError: Some key, value or combination cannot be used. The text lists all problems.
    """
    # Scripts pass anything.
    if not isinstance(user, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse([f"smp.init takes a dict of configuration keys, got {user!r}"])
    problems: list[str] = []
    wrong: set[str] = set()
    ignored: set[str] = set()
    layers = []
    for origin, source, given in (
        ("SM_HP_MP_PARAMETERS", "launcher", env.smp_parameters),
        ("MPXLA_CONFIG", "launcher", env.mpxla_config),
        ("smp.init", "init", user),
        *((name, "launcher", keys) for name, keys in _keys_of_variables(env, user)),
    ):
        given = given or {}
        ignored |= {
            name
            for name in IGNORED_KEYS
            if given.get(name) not in (None, DEFAULTS.get(name, False))
        }
        layers.append(_Layer(origin, source, _read_layer(given, origin, problems, wrong)))
    values, sources, overrides = _merge(layers)
    if problems:
        refuse(problems + broken(REFUSED, values, sources, wrong))
    config = Config(**values, set_by=sources)
    if env.rank == 0 and env.downcast:
        get_logger().warning(
            "configuration: %s is deprecated by torch_xla; it means %s here. Set the key instead.",
            env.downcast,
            "bf16: True" if config.bf16 else "nothing, because fp16 is set",
        )
    if env.rank == 0:
        _log(config, values, overrides, sorted(ignored))
    return config


def _read_layer(
    given: Mapping[str, Any], origin: str, problems: list[str], wrong: set[str]
) -> dict[str, Any]:
    """Canonical keys and converted values of one source; the rest goes to `problems`, `wrong`."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for spelling, value in given.items():
        name = ALIASES.get(spelling, spelling)
        if name not in KINDS:
            if spelling not in IGNORED_KEYS:
                problems.append(describe_unknown(spelling, origin))
            continue
        if value is None and KINDS[name].is_nullable:
            continue
        try:
            value = convert(name, value, spelling, origin)
        except ValueError as error:
            problems.append(str(error))
            wrong.add(name)
            continue
        if name in values and values[name] != value:
            problems.append(
                f"{spelled[name]}: {values[name]!r} and {spelling}: {value!r} (from {origin}) are "
                "two spellings of one key; remove one"
            )
            wrong.add(name)
        values[name], spelled[name] = value, spelling
    return values


def _merge(layers: list[_Layer]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Values of all keys, source of those that were set, and a line for each one overridden."""
    values = dict(DEFAULTS)
    winners: dict[str, _Layer] = {}
    overrides = []
    for layer in layers:
        for name, value in layer.values.items():
            winner = winners.setdefault(name, layer)
            if winner is layer:
                values[name] = value
            elif values[name] != value:
                overrides.append(
                    f"{name} = {values[name]!r} from {winner.origin} overrides {value!r} from "
                    f"{layer.origin}"
                )
    return values, {name: layer.source for name, layer in winners.items()}, overrides


def _keys_of_variables(
    env: LaunchEnv, user: Mapping[str, Any] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variables of torch_xla and Neuron that stand for keys, unless somebody says otherwise.

    Scripts set Neuron's beside float32 masters as well, which need no rounding.
    """
    layers = [layer or {} for layer in (env.smp_parameters, env.mpxla_config, user)]
    if any(layer.get(name) for layer in layers for name in ("fp16", "fp16_params")):
        return
    if env.downcast:
        yield env.downcast, {"bf16": True}
    if env.rounds_stochastically and any(k.get("master_dtype") == "same" for k in layers):
        yield ROUNDING_VARIABLE, {"stochastic_rounding": True}


def _log(
    config: Config, values: Mapping[str, Any], overrides: list[str], ignored: list[str]
) -> None:
    logger = get_logger()
    for line in overrides:
        logger.info("configuration: %s", line)
    asked = values["active_microbatches"]
    if asked is not None and asked > config.microbatches:
        logger.info(
            "configuration: active_microbatches = %d is lowered to microbatches = %d",
            asked,
            config.microbatches,
        )
    for name in ignored:
        logger.warning("configuration: %s is ignored: %s", name, IGNORED_KEYS[name])
    for line in broken(IDLE, values, dict(config.sources)):
        logger.warning("configuration: %s", line)
    for line in config.describe():
        logger.info("configuration: %s", line)
