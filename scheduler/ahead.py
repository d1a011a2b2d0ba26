"""The step after one that is still being computed: what can be said of it before that one's tokens are known."""

from collections.abc import Iterable, Sequence

from model_runner.contract import ScheduledRequest, StepPlan
from scheduler.block_pool import BlockPool, blocks_for
from scheduler.request import Request


def goes_on_alone(plan: StepPlan, running: Iterable[Request]) -> list[Request] | None:
    """Those who compute one token each in the next step, whatever this one brings, in order of admission.

    Choices that end with this step for their length are left out; those that turn out to have ended by a token compute
    one for nothing.

    Args:
        plan: the step that is being computed.
        running: all running choices, in order of admission.

    Returns:
        None if the next step depends on what this one brings: where a choice is within its prompt, has drafts or
        candidates to verify, or is of a group, whose members wait for each other.
    """
    shares = {share.key: share for share in plan.scheduled}
    going = []
    for request in running:
        share = shares.get(request.key)
        if share is None or not _is_plain(request, share):
            return None
        if request.num_output + 1 < request.max_tokens:
            going.append(request)
    return going


def plan_ahead(going: Sequence[Request], pool: BlockPool, block_size: int) -> StepPlan | None:
    """A step in which these compute the token that is not known yet; None where there are no blocks for that."""
    num_new = [max(0, blocks_for(len(request.tokens) + 1, block_size) - len(request.blocks)) for request in going]
    if not pool.can_allocate(sum(num_new)):
        return None
    shares = []
    for request, count in zip(going, num_new, strict=True):
        new_blocks = pool.allocate(count)
        request.blocks += new_blocks
        shares.append(ScheduledRequest(request.key, 1, tuple(new_blocks)))
    return StepPlan((), (), (), tuple(shares))


def _is_plain(request: Request, share: ScheduledRequest) -> bool:
    if request.group is not None or request.sampling.num_candidates or request.num_draft or share.num_draft:
        return False
    return share.num_tokens == request.remaining
