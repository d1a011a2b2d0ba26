"""Decides what runs next. Plain Python integers and lists: no torch, no asyncio, no HTTP."""
