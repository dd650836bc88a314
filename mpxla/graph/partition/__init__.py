"""Which stage every node of a step belongs to: by cost, or by the user's placement."""
