"""The written pages are the code's: what they name, quote and link to is there."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from model_runner.spec.families import FAMILIES, WRAPPERS
from server.cli import main as cli
from server.config import Settings

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("server", "scheduler", "model_runner", "bench", "tests", "docs", "deploy")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OF_OTHERS = {
    *FAMILIES,
    *WRAPPERS,
    *(
        "ExpertsInterface",
        "HF_HOME",
        "OLLAMA_HOST",
        "MemoryError",
        "PIP_EXTRA_INDEX_URL",
        "api.openai.com",
        "python_info",
    ),
    *("router.epp.pluginsConfig", "router.modelServers.matchLabels", "kvEventsConfig", "discoverPods", "socketPort"),
    *("h_v", "p_j", "p_M", "serveConfigV2", "trust_remote_code", "rope_scaling"),
    *("runtime_env", "ray_serve_deployment_queued_queries", "ray_serve_deployment_replica_healthy"),
}
"""Words in code spans and drawings that look like our names: other programs, hosts, symbols in formulas."""
OPTIONS_OF_OTHERS = {
    "--find-links",  # pip
    *("--help", "--index-url", "--upgrade", "--network", "--num-cpus", "--profile"),
    *("--build-arg", "--metrics-export-port"),
    *("--create-namespace", "--install", "--set"),
}
"""Options of our commands, pip, Docker, Helm and Ray."""

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_PATH = re.compile(r"[\w*./-]*[\w*]\.(py|h|sh)|[\w*./-]+/")
_CALL = re.compile(r"\b([a-z_]\w*)\(")
API_PAGES = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
MOST_WORDS = 6_000
OF_DEVELOPERS = {"bench", "dev", "docs"}
"""Extras that only this repository needs."""


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> str:
    return request.param.read_text()


def test_generated_pages_are_up_to_date() -> None:
    check = [sys.executable, "docs/generate.py", "--check"]
    result = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("api/chat-completions", "`choices[].stop_reason`"),
        ("api/chat-completions", "`choices[].message.tool_calls[].id`"),
        ("api/objects", "`content`"),
        ("api/fields", "`beam_search.width`"),
        ("errors", "405"),
        ("errors", "504"),
        ("errors", "`context_length_exceeded`"),
        ("metrics", "`samewise:num_requests_waiting`"),
    ],
)
def test_the_reference_goes_into_depth(page: str, row: str) -> None:
    assert f"\n| {row} |" in (ROOT / "docs" / "reference" / f"{page}.md").read_text()


@pytest.mark.parametrize("page", API_PAGES, ids=lambda page: page.stem)
def test_pages_of_the_api_begin_with_their_purpose_and_a_request(page: Path) -> None:
    beginning = re.split(r"^## ", page.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    purpose = re.search(r"^# .+\n\n[A-Z`].+(\n.+)*[.:]\n\n", beginning, re.MULTILINE)
    assert purpose, "no sentence below the title"
    assert any(language in ("bash", "sh", "python") for language, _ in _FENCED.findall(beginning)), "no example"


def test_no_page_of_the_reference_is_long() -> None:
    pages = (ROOT / "docs" / "reference").rglob("*.md")
    assert {page.name: words for page in pages if (words := len(page.read_text().split())) > MOST_WORDS} == {}


def test_names_and_paths_in_pages_exist(page: str) -> None:
    assert [word for word in _words(page) if not _exists(word)] == []


def test_options_in_pages_exist(page: str) -> None:
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)
    assert [option for option in named if option not in _options()] == []


def test_code_in_pages_is_quoted() -> None:
    for page in PAGES:
        if page.name == "README.md":
            continue
        for language, block in _FENCED.findall(page.read_text()):
            if language == "python":
                assert any(_unindented(block) in _unindented(source.read_text()) for source in SOURCES), block


def test_extras_for_users_are_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "how-to" / "install.md").read_text().partition("| extra | adds |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == sorted(extras.keys() - OF_DEVELOPERS)


def test_links_in_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _anchors(other.read_text()), f"{page.name}: {target}"


@pytest.mark.parametrize("word", ["_kv_kind", "scheduler/motor.py", "Engine.halt", "bench.nothing", "ScoreTransformer"])
def test_what_does_not_exist_is_noticed(word: str) -> None:
    assert not _exists(word)


def _words(page: str) -> Iterator[str]:
    """Words in code spans and drawings that look like our names or paths."""
    for span in _SPAN.findall(_FENCED.sub("", page)):
        for word in span.split():
            plain = word.strip("()[],;:\"'")
            if "()" in word or _PATH.fullmatch(plain) or (_NAME.fullmatch(plain) and _is_telling(plain)):
                yield plain
    for language, block in _FENCED.findall(page):
        if not language:
            yield from (match.group() for match in _PATH.finditer(block))
            yield from _CALL.findall(block)
            yield from filter(_is_telling, re.findall(r"\b[A-Z]\w+", block))


def _is_telling(word: str) -> bool:
    """Not just a word that happens to be code."""
    return "_" in word or "." in word or re.search("[a-z][A-Z]", word) is not None


def _exists(word: str) -> bool:
    names, members = _definitions()
    if word in names or word in OF_OTHERS or word.removesuffix("_total") in names:  # which ends names of counters
        return True
    if _PATH.fullmatch(word) or word.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
        return any(ROOT.glob(word.rstrip("/"))) or any(any((ROOT / top).glob(f"**/{word}")) for top in FOLDERS)
    first, *others = word.split(".")
    if first in members:
        return all(other in members[first] for other in others)
    if first in FOLDERS:
        module = ROOT.joinpath(first, *others)
        return module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    return bool(others) and all(part in names for part in (first, *others))


@cache
def _definitions() -> tuple[frozenset[str], dict[str, set[str]]]:
    """Everything that the sources define, import or write as a string of one word; and the members of each class."""
    names, members = {f"SAMEWISE_{field.upper()}" for field in Settings.model_fields}, dict[str, set[str]]()
    for build in ("Dockerfile", "Makefile"):
        names.update(re.findall(r"\b[A-Z_]+\b", (ROOT / build).read_text()))
    names.update(re.findall(r"\b([a-z]\w+):", (ROOT / "deploy" / "helm" / "samewise" / "values.yaml").read_text()))
    for source in SOURCES:
        if source == Path(__file__):
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            names.update(_defined(node))
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(name for part in ast.walk(node) for name in _defined(part))
    return frozenset(names), members


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield other or name
        case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.-]+", text):
            yield text


@cache
def _options() -> frozenset[str]:
    """Options of the commands and of the programs in the repository."""
    root = typer.main.get_command(cli.app)
    parameters = [parameter for command in root.commands.values() for parameter in command.params]
    of_commands = {option for one in [*root.params, *parameters] for option in (*one.opts, *one.secondary_opts)}
    return frozenset(of_commands | OPTIONS_OF_OTHERS | {name for name in _definitions()[0] if name.startswith("--")})


def _unindented(code: str) -> str:
    return "\n".join(line.strip() for line in code.strip().splitlines())


def _anchors(page: str) -> set[str]:
    """The anchors of headings, as the site has them: of several alike, all but the first end with a number."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        alike = sum(re.fullmatch(rf"{re.escape(anchor)}(_\d+)?", other) is not None for other in anchors)
        anchors.append(f"{anchor}_{alike}" if alike else anchor)
    return set(anchors)
