"""What a plan owes to whoever asked for it."""

from dataclasses import replace

from scheduler.interface import BACKGROUND, EngineRequest
from server.api.services import Services
from server.generation.planning.plan import Plan
from server.telemetry.request_trace import RequestTrace
from server.tenants.accounts import Account
from server.tenants.keys import Tenant
from server.tenants.rate_limits import Cost


async def admit(plan: Plan, record: RequestTrace, services: Services) -> tuple[Plan, Account]:
    """The plan as its client's, and the account that it is on. Raises LimitError if that is overdrawn."""
    account = await services.accounts.open(record.client, cost_of(plan), is_background=record.is_background)
    tier = BACKGROUND if record.is_background else account.tenant.priority
    return of_tenant(plan, account.tenant, tier, isolates=services.settings.isolate_keys), account


def of_tenant(plan: Plan, tenant: Tenant, tier: int, *, isolates: bool) -> Plan:
    """The plan with what the engine has to know of the tenant."""
    if tenant == Tenant() and not tier:
        return plan
    requests = [replace(one, client=tenant.name, weight=tenant.weight, tier=tier) for one in plan.requests]
    return replace(plan, requests=tuple(_isolated(one) for one in requests) if isolates else tuple(requests))


def _isolated(request: EngineRequest) -> EngineRequest:
    """The request with names of its own for what the engine keeps of it: cached blocks and compiled grammars."""
    sampling = request.sampling
    if sampling.grammar is not None:
        sampling = replace(sampling, grammar=f"{sampling.grammar}// {request.client.encode().hex()}\n")
    return replace(request, sampling=sampling, cache_salt=f"{request.client}/{request.cache_salt}")


def cost_of(plan: Plan) -> Cost:
    """What the plan comes to, at most."""
    num_choices = sum(request.num_drawn for request in plan.requests)
    return Cost(
        num_prompt=sum(request.num_input for request in plan.requests),
        num_output=sum(request.num_drawn * request.max_tokens for request in plan.requests),
        num_choices=num_choices if plan.at_a_time is None else min(num_choices, plan.at_a_time),
        is_bounded=plan.is_bounded,
    )
