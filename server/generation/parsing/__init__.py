"""Parsing of model output into reasoning, text and tool calls."""
