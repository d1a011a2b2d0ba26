"""Starts Samewise, and finds its packages.

Installed from a wheel, `server`, `scheduler` and `model_runner` are in the folder `_packages`, because other
distributions use these names, too. In a clone or an editable install they are importable anyway.
"""

import os
import sys
from pathlib import Path

PACKAGES = Path(__file__).parent / "_packages"


def find_packages() -> None:
    """Make the packages importable, in this process and its children."""
    folder = str(PACKAGES)
    if PACKAGES.is_dir() and folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Entry point of the `samewise` script and of `python -m samewise`."""
    find_packages()
    from server.cli.main import main as run  # noqa: PLC0415

    run()
