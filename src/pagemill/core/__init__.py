"""The pure core: what gets computed next, and which blocks it uses. No torch, no I/O, no threads, no clock."""
