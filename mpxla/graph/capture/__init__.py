"""Capture of a step function: user code, model and loss become one functional graph."""
