"""Configuration keys that the launcher's own options stand for."""

import json
from collections.abc import Mapping
from typing import Any

from mpxla.env import read_environment, set_variables

__all__ = ["configure"]


def configure(keys: Mapping[str, Any]) -> None:
    """Adds keys to the configuration in `MPXLA_CONFIG`, for this process and those it starts."""
    before = read_environment().mpxla_config or {}
    set_variables({"MPXLA_CONFIG": json.dumps({**before, **keys})})
