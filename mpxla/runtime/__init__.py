"""Running steps: microbatches, buffers of live values, the executor and the step function."""
