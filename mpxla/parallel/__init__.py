"""What the user wraps: model and optimizer, and the reduction of gradients over replicas."""
