"""Ops: a reference function each, and the implementations that are faster."""
