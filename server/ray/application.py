"""The application for Ray Serve: `serve run server.ray.application:build min_replicas=2`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

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
from server.config import misspelt_variables
from server.errors import InternalError, UnavailableError
from server.logs import configure_logging
from server.ray.autoscaling import LoadPolicy
from server.ray.exchange import Accepted, ForwardedRequest
from server.ray.front import create_front
from server.ray.models import ModelReplicas
from server.ray.options import Deployment, ModelDeployment, ReplicaOptions, read_arguments
from server.ray.replica import Replica
from server.ray.router import PromptStartRouter

_ANY_NUMBER = 100_000
"""Concurrent requests, effectively unlimited: replicas bound their own queues and refuse requests, Ray would not."""
_STATS_PERIOD_S = 2.0
_HEALTH_PERIOD_S = 5.0
_END_S = 10.0
"""Time after the last request for the engine to stop and for storage and traces to be written."""
_logger = logging.getLogger("samewise.ray")


def build(arguments: dict[str, Any]) -> Application:
    """Build the application from fields of `Options` and settings of `samewise serve`.

    Settings that are not given come from the environment. Raises OptionsError.
    """
    for warning in misspelt_variables():
        _logger.warning(warning)
    deployment = read_arguments(arguments)
    options, settings = deployment.options, deployment.settings
    warn_if_open(settings, "the address of Ray's proxies", "The setting api_key sets a key.")
    for model in deployment.models:
        warn_if_unused(model.settings)
    if deployment.has_many and settings.api_keys_file is not None and settings.redis_url is None:
        _logger.warning("Each replica enforces the keys' limits separately. Set redis_url to share the counts.")
    ends = {
        "max_ongoing_requests": _ANY_NUMBER,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": settings.drain_grace_s + _END_S,
    }
    models = [_replicas(model, ends).bind(model.settings, settings) for model in deployment.models]
    ingress = serve.deployment(Ingress).options(**ends, num_replicas=options.ingress_replicas)
    return ingress.bind(models, deployment)


@serve.ingress()
class Ingress:
    """The deployment that receives requests from Ray's proxies and forwards them to replicas."""

    def __init__(self, models: Sequence[DeploymentHandle], deployment: Deployment) -> None:
        settings = self._settings = deployment.settings
        configure_logging(settings.log_format, settings.log_level)
        self._models = [
            ModelReplicas(HandleReplicas(handle), model.names)
            for handle, model in zip(models, deployment.models, strict=True)
        ]
        self._has_many = deployment.has_many
        # Each ingress process counts its own requests, so the metrics need distinct names.
        tag = "" if deployment.options.ingress_replicas == 1 else f"-{serve.get_replica_context().replica_tag}"
        self._name = f"ingress{tag}"

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_front(self._models, self._settings, has_many=self._has_many, name=self._name)


def _replicas(model: ModelDeployment, ends: Mapping[str, Any]) -> serve.Deployment:
    """The deployment of a model. One of several has its name, quoted because Ray names files after it."""
    options = model.options
    return serve.deployment(Replica).options(
        **ends,
        name="-".join(["Replica", *(quote(name, safe="") for name in model.names[:1])]),
        autoscaling_config=_autoscaling(options),
        request_router_config=RequestRouterConfig(
            request_router_class=PromptStartRouter, request_routing_stats_period_s=_STATS_PERIOD_S
        ),
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )


def _autoscaling(options: ReplicaOptions) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.most,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=LoadPolicy, policy_kwargs={"target_load": options.target_load}),
    )


NO_REPLICA_S = 30.0
"""Time to wait for a replica to accept a request. Running replicas accept at once, so after this there is none."""
METRICS_S = 5.0
"""Time limit for the replicas' metrics."""
_NO_METRICS = "No replica answers. Please try again later."


class HandleReplicas:
    """Implements Replicas with Ray's handle, and turns Ray's errors into API errors."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Accepted | Message]:
        """Yield a replica's messages. Raises UnavailableError if there is no replica or it ends, else InternalError."""
        response = self._handle.options(stream=True, session_id=session).answer.remote(request)
        try:
            try:
                async with asyncio.timeout(NO_REPLICA_S):
                    accepted = await anext(response)
            except TimeoutError:
                raise UnavailableError("No replica is ready. Please try again later.") from None
            yield accepted
            async for message in response:
                yield message
        except RayTaskError as error:
            _logger.exception("A replica failed on request %s.", request.scope["path"])
            raise InternalError("The server had an error while processing your request.") from error
        except (RayError, RayServeException) as error:
            message = f"The replica that processed this request has stopped ({type(error).__name__})."
            raise UnavailableError(f"{message} Please send the request again.") from error
        finally:
            response.cancel()

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """Names and metrics of the replicas that answer in time. Raises UnavailableError if none does."""
        responses = self._handle.broadcast("metrics")
        try:
            # In a thread, because `results_async` has one time limit for all replicas and then returns no results.
            results = await asyncio.to_thread(responses.results, timeout_s=METRICS_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            raise UnavailableError(_NO_METRICS) from None
        pages = [one for one in results if not isinstance(one, BaseException)]
        if errors := [type(one).__name__ for one in results if isinstance(one, BaseException)]:
            _logger.warning("%d of %d replicas returned no metrics: %s", len(errors), len(results), ", ".join(errors))
        if not pages:
            raise UnavailableError(_NO_METRICS)
        return pages
