"""The engine: the loop around the pure core, the process it runs in, and the front between text and tokens."""
