"""The application for Ray Serve: `serve run server.ray.application:build min_replicas=2`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Message

from server.assembly import warn_if_open, warn_if_unused
from server.config import Settings, misspelt_variables
from server.errors import InternalError, UnavailableError
from server.logs import configure_logging
from server.ray.autoscaling import LoadPolicy
from server.ray.exchange import ForwardedRequest, Taken
from server.ray.front import create_front
from server.ray.options import Options, read_arguments
from server.ray.replica import Replica
from server.ray.router import PromptStartRouter

_ANY_NUMBER = 100_000
"""Requests at a time. Replicas bound their work themselves and refuse the rest; Ray would let it wait in silence."""
_STATS_PERIOD_S = 2.0
_HEALTH_PERIOD_S = 5.0
_END_S = 10.0
"""Time after the last request for the engine to end, and for storage and traces to be written."""
_logger = logging.getLogger("samewise.ray")


def build(arguments: dict[str, Any]) -> Application:
    """The application. Arguments are fields of `Options` and settings of `samewise serve`; others come from the
    environment. Raises OptionsError.
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
    """Gets the requests of Ray's proxies."""

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


NO_REPLICA_S = 30.0
"""A request that no replica takes for this long is refused: replicas take all requests, so there is none."""
METRICS_S = 5.0
"""Time for each replica to send its metrics."""
_NO_METRICS = "No replica answers. Please try again later."


class HandleReplicas:
    """The replicas behind Ray's handle, with Ray's errors as clients see them. Implements Replicas."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Taken | Message]:
        """Pass on a replica's messages, as `Replicas.answer` says."""
        response = self._handle.options(stream=True, session_id=session).answer.remote(request)
        try:
            try:
                async with asyncio.timeout(NO_REPLICA_S):
                    taken = await anext(response)
            except TimeoutError:
                raise UnavailableError("No replica is ready. Please try again later.") from None
            yield taken
            async for message in response:
                yield message
        except RayTaskError as error:
            _logger.exception("A replica failed on request %s.", request.scope["path"])
            raise InternalError("The replica had an error while processing your request.") from error
        except (RayError, RayServeException) as error:
            message = f"The replica that had this request has ended, and its answer with it ({type(error).__name__})."
            raise UnavailableError(f"{message} Please send the request again.") from error
        finally:
            response.cancel()

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """See Replicas."""
        asked = self._handle.broadcast("metrics")
        try:
            # In a thread, since `results_async` has one time limit for all of them, after which it tells none.
            told = await asyncio.to_thread(asked.results, timeout_s=METRICS_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            raise UnavailableError(_NO_METRICS) from None
        pages = [one for one in told if not isinstance(one, BaseException)]
        if errors := [type(one).__name__ for one in told if isinstance(one, BaseException)]:
            _logger.warning("%d of %d replicas told no metrics: %s", len(errors), len(told), ", ".join(errors))
        if not pages:
            raise UnavailableError(_NO_METRICS)
        return pages
