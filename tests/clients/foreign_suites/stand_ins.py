"""Modules in place of packages that a suite imports and that are not installed here."""

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Anything(type):
    """Metaclass of classes that have every attribute, so that a test module can be imported."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __or__(cls, other: object) -> object:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: object) -> object:
        return cls

    def __bool__(cls) -> bool:
        return False


def _anything(name: str) -> type:
    """A class by this name that takes any arguments; as an exception it can be raised and caught."""

    def accept(self: object, *args: object, **kwargs: object) -> None: ...

    def attribute(self: object, attribute: str) -> object:
        return getattr(type(self), attribute)

    return _Anything(name, (Exception,), {"__init__": accept, "__getattr__": attribute})


class _StandIn(ModuleType):
    """A module that has everything that is imported from it."""

    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = _anything(name)
        setattr(self, name, thing)
        return thing


class _Finder(MetaPathFinder, Loader):
    """Finds a package and all that is under it before any folder is searched."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        inside = name == self._package or name.startswith(f"{self._package}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(package: str, **known: dict[str, object]) -> None:
    """Replace a package. Attributes that the tests need in earnest are given by module."""
    sys.meta_path.insert(0, _Finder(package))
    for module, attributes in known.items():
        name = f"{package}.{module}"
        __import__(name)
        vars(sys.modules[name]).update(attributes)
