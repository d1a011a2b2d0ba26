"""A selection of the model types whose results docs/reference/model-types.md lists."""

import re

import pytest

from bench import model_breadth
from bench.model_breadth import PAGE, Outcome, render, try_type

SERVED = [
    "bert",
    "codegen",
    "diffllama",
    "falcon",
    "gpt_neo",
    "longcat_flash",
    "qwen3_vl",
    "xglm",
]
REFUSED = ["bloom", "mpt"]


def listed(section: str) -> set[str]:
    """The model types in a section's table."""
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([a-z][\w.-]*) \|", text, re.MULTILINE))


@pytest.mark.parametrize("model_type", SERVED)
def test_served_types_answer_as_transformers_does(model_type: str) -> None:
    assert try_type(model_type).verdict == "served"
    assert model_type in listed("Served")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_types_say_why(model_type: str) -> None:
    outcome = try_type(model_type)
    assert outcome.verdict == "refused"
    assert outcome.reason.endswith("docs/reference/model-types.md lists the supported models")
    assert model_type in listed("Refused")


def test_other_answers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_breadth, "_greedy", lambda model, prompt: tuple(prompt[:3]))
    outcome = try_type("stablelm")
    assert outcome.verdict == "differs"
    assert "by transformers, but" in outcome.reason


def test_the_page_counts_and_sorts_by_verdict() -> None:
    served = Outcome("llama", "served", model_class="LlamaForCausalLM", layers="full", is_native=True)
    refused = Outcome(
        "mpt", "refused", "(a mpt model) has no | pages; docs/reference/model-types.md lists", layers="full"
    )
    page = render([served, refused])
    assert "**1 are\nserved**, and 1 are refused" in page
    assert "| llama | LlamaForCausalLM | full | one native call |" in page
    assert "| mpt | full | has no / pages |" in page


def test_no_type_crashes_or_differs_on_the_page() -> None:
    assert len(listed("Served")) >= 150
    assert not re.search(r"\| (differs|crashed): ", PAGE.read_text())
