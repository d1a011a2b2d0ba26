"""The application for Ray Serve: `serve run server.ray.application:build min_replicas=2`."""

import logging
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from server.cli.flags import misspelt_variables
from server.cli.lifecycle import warn_if_open, warn_if_unused
from server.config import Settings
from server.logs import configure_logging
from server.ray.autoscaling import LoadPolicy
from server.ray.front import create_front
from server.ray.handle import HandleReplicas
from server.ray.options import Options, read_arguments
from server.ray.replica import Replica
from server.ray.router import PromptStartRouter

_ANY_NUMBER = 100_000
"""Of requests at a time. Servers bound the work that they hold by themselves, and say so to those that are too many;
Ray would let them wait in silence."""
_STATS_PERIOD_S = 2.0
_HEALTH_PERIOD_S = 5.0
_END_S = 10.0
"""After the last request, for the engine to end, and for what is stored and traced to be written."""
_logger = logging.getLogger("samewise.ray")


def build(arguments: dict[str, Any]) -> Application:
    """The application. Arguments are options of `Options`, and settings of `samewise serve`; those that are not given
    are read from the environment where this is called.

    Raises OptionsError.
    """
    for warning in misspelt_variables():
        _logger.warning(warning)
    deployment = read_arguments(arguments)
    options, settings = deployment.options, deployment.settings
    warn_if_open(settings, "the address of Ray's proxies", "The setting api_key sets a key.")
    warn_if_unused(settings)
    if options.most > 1 and settings.api_keys_file is not None and settings.redis_url is None:
        _logger.warning("Each of the replicas counts by itself what keys use; with redis_url they count together.")
    ends = {
        "max_ongoing_requests": _ANY_NUMBER,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": settings.drain_grace_s + _END_S,
    }
    replicas = serve.deployment(Replica).options(
        **ends,
        autoscaling_config=_autoscaling(options),
        request_router_config=RequestRouterConfig(
            request_router_class=PromptStartRouter, request_routing_stats_period_s=_STATS_PERIOD_S
        ),
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    ingress = serve.deployment(Ingress).options(**ends, num_replicas=options.ingress_replicas)
    return ingress.bind(replicas.bind(settings), settings, options)


@serve.ingress()
class Ingress:
    """What Ray's proxies send requests to."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings, options: Options) -> None:
        configure_logging(settings.log_format, settings.log_level)
        self._replicas = HandleReplicas(replicas)
        self._settings = settings
        self._has_many = options.most > 1
        # Each counts for itself, and whichever is asked tells only what it has counted.
        tag = "" if options.ingress_replicas == 1 else f"-{serve.get_replica_context().replica_tag}"
        self._name = f"ingress{tag}"

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_front(self._replicas, self._settings, has_many=self._has_many, name=self._name)


def _autoscaling(options: Options) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.most,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=LoadPolicy, policy_kwargs={"target_load": options.target_load}),
    )
