"""Replicas on Ray Serve: `serve run server.ray.application:build`. docs/ray.md explains the setup."""
