from itertools import combinations

import msgspec
import pytest

from server.api.capabilities import describe_fields
from server.api.chat.schema import ChatCompletionRequest
from server.config import Settings
from server.page.capabilities import FieldDescription, fields_of, has_fields
from server.page.compare.presets import BEAM_PRESETS, FIRST, PRESETS, offered

DESCRIBED = msgspec.convert(
    msgspec.to_builtins(describe_fields(ChatCompletionRequest, {}, Settings())),
    dict[str, FieldDescription],
)
ALL = (*PRESETS, *BEAM_PRESETS)


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_is_a_request_that_samewise_takes(preset):
    ChatCompletionRequest.model_validate(
        {"model": "any", "messages": [{"role": "user", "content": "Hello"}], **preset.settings}
    )
    for one, other in combinations(preset.settings, 2):
        assert other not in DESCRIBED[one].excludes


def test_samewise_is_offered_all_presets():
    assert list(offered(PRESETS, DESCRIBED)) == [preset.name for preset in PRESETS]
    assert set(FIRST) <= {preset.name for preset in PRESETS}


def test_presets_whose_fields_are_refused_are_not_offered():
    described = {**DESCRIBED, "dola": FieldDescription(support="refused")}
    assert set(offered(PRESETS, DESCRIBED)) - set(offered(PRESETS, described)) == {"DoLa"}


def test_presets_whose_fields_the_server_lacks_are_not_offered():
    described = {"temperature": FieldDescription(support="honoured"), "top_p": FieldDescription(support="no_effect")}
    assert list(offered(PRESETS, described)) == ["Greedy", "Sampling"]


def test_a_server_that_says_nothing_is_offered_what_openai_has():
    assert list(offered(PRESETS, {})) == ["Greedy", "Sampling", "Nucleus", "Frequency penalty"]
    assert not offered(BEAM_PRESETS, {})
    assert has_fields({}, ["n"])
    assert not has_fields({}, ["return_token_ids"])


def test_all_fields_of_samewise_are_read():
    assert fields_of(DESCRIBED)["temperature"].range == "0 to 2"
    assert {fields_of(DESCRIBED)[name].kind for name in ("top_k", "stop")} == {"integer", "json"}
