"""Builds the package. pyproject.toml has everything about it except what depends on how it is built.

A wheel has the packages in `samewise/_packages`, so that their names do not get in the way of others. The native
libraries, with all instruction sets, are in `model_runner/kernels/built`: the wheel fits every Python on one kind of
machine, which needs no compiler. Without a compiler, or on another system than Linux, the wheel has no libraries and
fits all machines, which compile them at the first start. An editable install keeps the folders as they are.
"""

import os
import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGES = find_packages(str(ROOT), include=["server*", "scheduler*", "model_runner*"])
DATA = {
    "server.page": ["static/*"],
    "model_runner.kernels": ["cpu/*", "suffix/*"],
    "model_runner.training": ["prompts.json"],
    "model_runner": ["embedded_heads/*/*"],
}
IS_EDITABLE = "editable_wheel" in sys.argv
PREFIX = "" if IS_EDITABLE else "samewise._packages."


class BuildWithLibraries(build_py):
    """Adds the native libraries to a wheel."""

    def run(self) -> None:
        super().run()
        self.distribution.libraries_built = False
        if self.editable_mode or sys.platform != "linux":
            return
        sys.path.insert(0, str(ROOT))
        from model_runner.kernels.build import NoKernelsError, build_packaged  # noqa: PLC0415

        kernels = Path(self.build_lib, *f"{PREFIX}model_runner.kernels".split("."))
        for stale in kernels.glob("built/*"):
            stale.unlink()
        try:
            for library in build_packaged(kernels / "built", os.environ, machine()):
                self.announce(f"built {library}", level=2)
            self.distribution.libraries_built = True
        except NoKernelsError as error:
            self.warn(f"the wheel has no native libraries, so they will be compiled where it is installed: {error}")


class WheelForAnyPython(bdist_wheel):
    """The tag of a wheel whose libraries are not Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if self.distribution.libraries_built else "any"


class DistributionWithLibraries(Distribution):
    """A wheel's files go to where libraries may be."""

    libraries_built = False

    def has_ext_modules(self) -> bool:
        return not IS_EDITABLE


def machine() -> str:
    """The processor that the wheel is for, as `platform.machine` names it there; _PYTHON_HOST_PLATFORM may differ."""
    host = os.environ.get("_PYTHON_HOST_PLATFORM") and sysconfig.get_platform().rpartition("-")[2]
    return host or platform.machine()


setup(
    packages=["samewise", *(PREFIX + package for package in PACKAGES)],
    package_dir={} if IS_EDITABLE else {PREFIX + name: name for name in ("server", "scheduler", "model_runner")},
    package_data={PREFIX + package: files for package, files in DATA.items()},
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelForAnyPython},
    distclass=DistributionWithLibraries,
)
