"""From the nodes of one stage to executables: specification, lowering, compilation."""
