"""Checkpoints of divided parameters, outside of jobs (path given by SMP's scripts)."""

from mpxla.checkpoint.merge import get_full_state_dict_from_sharded_data_parallel_checkpoint

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]
