"""Reasoning of each family with each end of prompts: reasoning on, off, and reasoning although it is off.

Recorded outputs with calls are in test_conformance.py; none of them is from a model with reasoning turned off.
"""

import pytest

from server.generation.output_formats import ModelFormats
from server.generation.parsing.choose import FULL_OUTPUT_FORMATS, REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import Expected
from tests.server.parsing.harness import parse

R1 = QWEN3 = ModelFormats("hermes", "think")
QWEN3_5 = ModelFormats("qwen3_xml", "think")
DEEPSEEK = ModelFormats("deepseek_v3", "think")
GLM = ModelFormats("glm", "think")
KIMI = ModelFormats("kimi_k2", "think")
MAGISTRAL = ModelFormats("mistral", "mistral_think")
GPT_OSS = ModelFormats("harmony")
OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("formats", "prompt", "output", "reasoning", "content"),
    [
        (R1, "<｜Assistant｜><think>\n", "Hm.\n</think>\n\nRed.", "Hm.", "Red."),
        (R1, "<｜Assistant｜><think>\n", "<think>\nHm.\n</think>\n\nRed.", "Hm.", "Red."),
        (R1, "<｜Assistant｜><think>\n", "Hm.", "Hm.", ""),
        (R1, "<｜Assistant｜>", "<think>\n\n</think>\n\nRed.", "", "Red."),
        (QWEN3, "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nRed.", "Hm.", "Red."),
        (QWEN3, OFF, "Red.", "", "Red."),
        (QWEN3, OFF, "<think>\nHm.\n</think>\n\nRed.", "Hm.", "Red."),
        (QWEN3, OFF, "Red: <think>.", "", "Red: <think>."),
        (QWEN3_5, "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nRed.", "Hm.", "Red."),
        (QWEN3_5, OFF, "Red.", "", "Red."),
        (QWEN3_5, OFF, "\n<think>\nHm.\n</think>\n\nRed.", "Hm.", "Red."),
        (DEEPSEEK, "<｜Assistant｜></think>", "Red.", "", "Red."),
        (DEEPSEEK, "<｜Assistant｜></think>", "<think>Hm.</think>Red.", "Hm.", "Red."),
        (GLM, "<|assistant|>", "\n<think>Hm.</think>\nRed.", "Hm.", "Red."),
        (GLM, "<|assistant|>\n<think></think>", "\nRed.", "", "\nRed."),
        (GLM, "<|assistant|>\n<think></think>", "\n<think>Hm.</think>\nRed.", "Hm.", "Red."),
        (MAGISTRAL, "[/INST]", "[THINK]Hm.[/THINK]Red.", "Hm.", "Red."),
        (MAGISTRAL, "[/INST]", "Red.", "", "Red."),
        (KIMI, "<|im_assistant|>assistant<|im_middle|><think>", " Hm. </think> Red.", "Hm.", "Red."),
        (KIMI, "<|im_assistant|>assistant<|im_middle|><think></think>", "Red.", "", "Red."),
        (GPT_OSS, "<|start|>assistant", f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Red.", "Hm.", "Red."),
        (GPT_OSS, "<|start|>assistant", "<|channel|>final<|message|>Red.", "", "Red."),
        (GPT_OSS, "<|start|>assistant", "<|channel|>analysis<|message|>Hm.", "Hm.", ""),
    ],
)
def test_reasoning_is_told_from_the_answer_in_any_pieces(
    formats: ModelFormats, prompt: str, output: str, reasoning: str, content: str
):
    tools = TOOL_FORMATS[formats.tool_format] if formats.tool_format in FULL_OUTPUT_FORMATS else None
    tags = None if formats.reasoning is None else REASONING_TAGS[formats.reasoning]
    expected = Expected(is_thinking=formats.is_thinking(prompt))
    for pieces in ([output], list(output)):
        message = parse(pieces, tools, tags, expected)
        assert (message.reasoning, message.content) == (reasoning, content)
