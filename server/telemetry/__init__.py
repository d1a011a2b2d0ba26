"""Observability: metrics, traces and the log of recent requests."""
