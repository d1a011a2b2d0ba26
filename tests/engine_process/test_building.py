"""Settings that depend on the loaded model's memory."""

from dataclasses import replace

import pytest

from model_runner.contract import CacheGroup, SamplingParams
from model_runner.runner_interface import RunnerInfo
from scheduler.checks import check_request
from scheduler.interface import BeamSearch, EngineRequest, SchedulerConfig
from server.engine.building import snapshot_interval

INFO = RunnerInfo(300, 4096, 1000, 32, 4, 512, "cpu", "float32", "float32", "none")


def admits(info: RunnerInfo, interval: int) -> bool:
    """Whether a search with as many beams as run at a time is admitted."""
    config = SchedulerConfig(
        info.block_size, info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len, snapshot_every=interval
    )
    request = EngineRequest("a", (5,) * 50, SamplingParams(), 40, beam_search=BeamSearch(info.max_num_seqs))
    try:
        check_request(request, config, info.num_blocks, info.groups)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("budget", [512, 8192])
@pytest.mark.parametrize("spare", [0, 1, 3, 20, 300])
def test_states_of_a_long_prompt_leave_room_for_requests(spare: int, budget: int) -> None:
    """Each interval is whole blocks and admits requests, or is refused with the smallest one that does."""
    pages = CacheGroup("page", 2 * INFO.max_num_seqs + 2 + spare)
    info = replace(INFO, groups=(CacheGroup("rows", 100), pages), max_num_batched_tokens=budget)
    default = snapshot_interval(None, info)
    assert default >= 2048
    assert admits(info, default)
    for asked in (0, 1, 31, 32, 33, 100, 512, 2000, 8193, 10**9):
        try:
            interval = snapshot_interval(asked, info)
        except ValueError as error:
            least = int(str(error).partition("set at least ")[2].partition(",")[0])
            assert asked < least <= budget + INFO.block_size
            assert not admits(info, -(-asked // INFO.block_size) * INFO.block_size)
            assert snapshot_interval(least, info) == least
            assert admits(info, least)
        else:
            assert interval in range(asked, asked + INFO.block_size, 1)
            assert interval % INFO.block_size == 0
            assert admits(info, interval)


def test_only_recurrent_layers_have_states() -> None:
    assert snapshot_interval(None, INFO) == 0
    with pytest.raises(ValueError, match="remove --state-snapshot-every"):
        snapshot_interval(512, INFO)
