"""What does not go with tensor parallelism yet."""

from mpxla.errors import ConfigError

__all__ = ["refuse_with_shards"]


def refuse_with_shards(what: str, size: int) -> None:
    """Checks that tensors are whole here, before something that would take parts for wholes.

    Args:
        what: the call or setting, for the text.
        size: `tensor_parallel_degree`.

    Raises:
        ConfigError: it is above 1.
    """
    if size > 1:
        raise ConfigError(
            f"{what} does not go with tensor_parallel_degree: {size} yet, where ranks hold parts "
            f"of tensors. Leave it out, or set tensor_parallel_degree: 1; model.state_dict() gives "
            f"whole tensors."
        )
