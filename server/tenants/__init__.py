"""Tenants: API keys, their limits, and their usage."""
