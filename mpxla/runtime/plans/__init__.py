"""From a call of a step function to what each rank runs: cut, schedule and programs."""
