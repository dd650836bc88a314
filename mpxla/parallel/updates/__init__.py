"""The optimizer's update: its state and its programs, whole or divided over replicas."""
