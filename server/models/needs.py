"""Plans every configured model at the start of a server, so that each has its limits before it is loaded."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from model_runner.model_needs import ModelNeeds
from server.engine.messages import EngineConfig, Plan
from server.models.spare import PlanError

logger = logging.getLogger("samewise.models")

_GIB = 1 << 30


async def plan_models(
    plan: Callable[[Plan], Awaitable[ModelNeeds]],
    configs: Mapping[str, EngineConfig],
    budget: int | None,
    cache_share: float | None = None,
) -> dict[str, ModelNeeds | PlanError]:
    """What each model needs, by name; the reason for those that can never be served. One after the other.

    Args:
        plan: `SpareWorker.plan`.
        configs: of all models, by name.
        budget: what one model may take, in bytes; None: what its device has free.
        cache_share: as in `Plan`.

    Raises:
        OSError: if no process can be started.
    """
    found: dict[str, ModelNeeds | PlanError] = {}
    for name, config in configs.items():
        try:
            needs = await plan(Plan(config, budget, cache_share))
        except PlanError as error:
            logger.error("The model %s can never be loaded: %s", name, error)
            found[name] = error
        else:
            logger.info("The model %s takes %.2f GiB once it is loaded.", name, needs.reserved_bytes / _GIB)
            found[name] = needs
    return found


def as_planned(config: EngineConfig, needs: ModelNeeds) -> EngineConfig:
    """The configuration with the planned cache, so that limits do not depend on what else is loaded."""
    return replace(config, runner=replace(config.runner, kv_cache_gib=needs.kv_cache_gib))
