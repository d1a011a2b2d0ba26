"""Formats by the texts of chat templates: the lines of each that show how calls and reasoning are written."""

import pytest

from server.generation.output_formats import ModelFormats
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS, reasoning_tags, tool_format
from server.text.chat_template import ChatTemplate

TEMPLATES = {
    "Qwen3": (r"""{{- '<tool_call>\n{"name": "' }} ... {{- '<think>\n\n</think>\n\n' }}""", "hermes", "think"),
    "Qwen3-Coder": (r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}""", "qwen3_xml", None),
    "Qwen3.5": (r"""{{- '<tool_call>\n<function=' + tool_call.name }} {{- '<think>\n' }}""", "qwen3_xml", "think"),
    "Seed-OSS": (r"""'<seed:tool_call>\n<function=' + tool_call.name '<seed:think>'""", "qwen3_xml", "seed_think"),
    "GLM-4.5": ("""'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> {{ '<think></think>' }}""", "glm", "think"),
    "Llama-3.1": (
        """'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'""",
        "llama3_json",
        None,
    ),
    "Llama-3.2, pythonic": (
        "'Respond in the format [func_name1(params_name1=params_value1)]'",
        "pythonic",
        None,
    ),
    "Mistral-7B-v0.3": ("""{{- "[TOOL_CALLS] [" }}""", "mistral", None),
    "Magistral-Small-2509": (
        """{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }} {{ '[THINK]' }}""",
        "mistral",
        "mistral_think",
    ),
    "Phi-4-mini": ("""'<|' + message['role'] + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>'""", "phi", None),
    "Granite-3.2": (
        "respond with <|tool_call|> followed by a JSON list. Write your thoughts after 'Here is my thought process:'",
        "granite",
        "granite_think",
    ),
    "Granite-4": ("within <tool_call></tool_call> XML tags <|start_of_role|>", "hermes", None),
    "DeepSeek-R1-Distill": ("message['content'].split('</think>')[-1] '<｜Assistant｜>'", None, "think"),
    "DeepSeek-V3.1": (
        """'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' '</think>'""",
        "deepseek_v3",
        "think",
    ),
    "DeepSeek-V3.2": ("""{% set dsml_token = '｜DSML｜' %} '<think>'""", "deepseek_dsml", "think"),
    "Kimi-K2-Instruct": ("""<|tool_calls_section_begin|> <|tool_call_begin|>{{ tool_call['id'] }}""", "kimi_k2", None),
    "Kimi-K3": ("""{{- '<|open|>think<|sep|>' }} {{- '<|close|>think<|sep|>' }}""", "kimi_k3", None),
    "Gemma-4": (
        """'<|tool_call>call:' + name + '{' '<tool_call|>' '<|channel>thought\\n<channel|>'""",
        "gemma4",
        "gemma4",
    ),
    "gpt-oss": ("""{{- "<|start|>assistant<|channel|>analysis<|message|>" }}""", "harmony", None),
    "Vicuna": ("USER: {{ message['content'] }} ASSISTANT:", None, None),
}


def test_calls_are_read_as_the_model_is_taught_to_write_them():
    without_tools = ChatTemplate(TEMPLATES["Vicuna"][0], {})
    assert ModelFormats.of(without_tools, "hermes").tool_format == "hermes"
    with pytest.raises(ValueError, match="tool_parser: the model's chat template does not support tools"):
        ModelFormats.of(without_tools, "mistral")


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_shows_the_format(template: str, tools: str | None, reasoning: str | None):
    assert tool_format(template) is (TOOL_FORMATS[tools] if tools else None)
    assert reasoning_tags(template) is (REASONING_TAGS[reasoning] if reasoning else None)
