"""HTTP, processes and lifecycle: everything between a client's socket and the engine's."""

__version__ = "0.1.0"
