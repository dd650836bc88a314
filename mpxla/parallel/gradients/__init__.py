"""Gradients between the backward and the update: reduced over replicas, scaled, clipped, shown."""
