"""Runs the steps that the core plans: rows, input batch, forward pass, sampling, memory."""
