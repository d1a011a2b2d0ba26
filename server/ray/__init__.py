"""Replicas on Ray Serve: `serve run server.ray.application:build`. docs/how-to/ray.md explains the setup."""
