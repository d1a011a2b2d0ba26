"""Running the engine by hand on a simulated runner that keeps its plans."""

from dataclasses import replace

from model_runner.contract import SamplingParams
from scheduler.engine import Engine
from scheduler.interface import ChoiceState, EngineRequest, FinishReason, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.scheduler.simulated_runner import SimulatedRunner
from tests.scheduler.simulated_world import expected_output

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)


class RecordingRunner(SimulatedRunner):
    def __init__(self, num_blocks, block_size, groups=()):
        super().__init__(num_blocks, block_size, groups=groups)
        self.plans = []

    def execute(self, plan):
        self.plans.append(plan)
        return super().execute(plan)


def make_engine(num_blocks=32, groups=(), **settings):
    config = replace(CONFIG, **settings)
    scheduler = Scheduler(config, num_blocks, groups=groups)
    return Engine(scheduler, RecordingRunner(num_blocks, config.block_size, groups))


def make_request(name="a", num_prompt=6, max_tokens=4, n=1, **sampling):
    """No stop tokens, and a seed for which no choice below runs into a poisoned token."""
    prompt = tuple(range(num_prompt))
    choices = tuple(ChoiceState(index) for index in range(n))
    request = EngineRequest(f":{name}", prompt, SamplingParams(**{"seed": 1, **sampling}), max_tokens, choices)
    assert all(expected_output(request, index)[2] is not FinishReason.ERROR for index in range(n))
    return request


def run(engine, *requests):
    """Add, run until nothing is left, and return all outputs by (request, choice)."""
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
        engine.check_integrity()
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.tokens]


def shares(plan):
    return {share.key.strip(":"): share.num_tokens for share in plan.scheduled}
