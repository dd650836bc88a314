"""What Python does in a step besides computing: values it reads and leaves, branches, draws."""
