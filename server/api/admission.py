"""What a plan owes to whoever asked for it."""

from dataclasses import replace

from scheduler.interface import BACKGROUND
from server.api.services import Services
from server.generation.planning.plan import Plan
from server.telemetry.request_record import RequestRecord
from server.tenants.accounts import Account
from server.tenants.rate_limits import Cost
from server.tenants.tenant import Tenant


async def admit(plan: Plan, record: RequestRecord, services: Services) -> tuple[Plan, Account]:
    """The plan as its client's, and the account that it is on. Raises LimitError if that is overdrawn."""
    account = await services.accounts.open(record.client, cost_of(plan), is_background=record.is_background)
    tier = BACKGROUND if record.is_background else account.tenant.priority
    return of_tenant(plan, account.tenant, tier, isolates=services.settings.isolate_keys), account


def of_tenant(plan: Plan, tenant: Tenant, tier: int, *, isolates: bool) -> Plan:
    """The plan with what the engine has to know of the tenant."""
    if tenant == Tenant() and not tier:
        return plan
    requests = tuple(
        replace(
            request,
            client=tenant.name,
            weight=tenant.weight,
            tier=tier,
            cache_salt=f"{tenant.name}/{request.cache_salt}" if isolates else request.cache_salt,
        )
        for request in plan.requests
    )
    return replace(plan, requests=requests)


def cost_of(plan: Plan) -> Cost:
    """What the plan comes to, at most."""
    num_choices = sum(request.num_drawn for request in plan.requests)
    return Cost(
        num_prompt=sum(request.num_input for request in plan.requests),
        num_output=sum(request.num_drawn * request.max_tokens for request in plan.requests),
        num_choices=num_choices if plan.at_a_time is None else min(num_choices, plan.at_a_time),
        is_bounded=plan.is_bounded,
    )
