"""Replicas by Ray Serve: `serve run server.ray.application:build`. Only application.py and router.py import Ray."""
