"""The workloads that engines are compared on, and the clients that drive them. Not imported by the engine."""
