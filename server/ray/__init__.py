"""Replicas by Ray Serve: `serve run server.ray.application:build`. See docs/ray.md."""
