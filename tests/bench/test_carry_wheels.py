"""Packages that a machine without a network needs, given the packages that it has."""

from importlib.metadata import distributions

import pytest
from packaging.utils import canonicalize_name

from bench.carry_wheels import packages_to_carry, read_freeze, target_options


@pytest.fixture
def here() -> dict[str, str]:
    """A machine that has all that is installed here."""
    return {canonicalize_name(one.name): one.version.partition("+")[0] for one in distributions()}


def test_only_what_is_missing_is_carried_with_what_that_requires(here: dict[str, str]) -> None:
    assert packages_to_carry(here, "3.12") == {}
    gone = (
        "llguidance",
        "msgspec",
        "uvicorn",
        "httptools",
        "scipy",
    )  # uvicorn is asked for with an extra; scipy is not
    there = {name: version for name, version in here.items() if name not in gone}
    assert packages_to_carry(there, "3.12") == {name: here[name] for name in gone[:-1]}


def test_what_does_not_go_with_what_is_carried_is_replaced(here: dict[str, str]) -> None:
    there = {name: version for name, version in here.items() if name != "pydantic"} | {"typing-extensions": "3.0"}
    carried = packages_to_carry(there, "3.12")
    assert carried == {name: here[name] for name in ("pydantic", "typing-extensions")}


@pytest.mark.parametrize("version", [None, "2.1.0"])
def test_torch_is_not_carried(here: dict[str, str], version: str | None) -> None:
    """A build for the machine's GPU must be there."""
    there = {name: one for name, one in here.items() if name != "torch"} | ({"torch": version} if version else {})
    with pytest.raises(
        ValueError, match=rf"the machine needs torch.* and has {version or 'none'}; install it there first"
    ):
        packages_to_carry(there, "3.12")


def test_a_list_of_packages_is_read_as_pip_writes_it() -> None:
    text = "torch==2.11.0+cu130\nPyYAML==6.0.3\nsamewise @ file:///work\n# a comment\ntyping_extensions==4.15.0\n"
    assert read_freeze(text) == {"torch": "2.11.0", "pyyaml": "6.0.3", "typing-extensions": "4.15.0"}


def test_all_older_platforms_are_named() -> None:
    options = target_options("3.12", "2.31", "x86_64")
    platforms = [option.removeprefix("--platform=") for option in options if option.startswith("--platform=")]
    assert platforms == [*(f"manylinux_2_{minor}_x86_64" for minor in range(31, 4, -1)), "manylinux2014_x86_64"]
    assert "--python-version=3.12" in options
