"""The C interfaces of the native libraries, parsed from their headers, so that Python repeats no declaration.

To parse them takes 0.2 s. So cffi's result is kept, in the folder of the library that is loaded.
"""

import contextlib
import hashlib
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.compiler import NoKernelsError
from model_runner.kernels.library_folder import PACKAGED, loadable, opened, store, unsealed

CData: TypeAlias = Any
"""A C value of cffi: a pointer, an array or a struct. It owns its own memory, but not the memory it points at."""
_ONLY_FOR_CPP = re.compile(r"(?ms:^#ifdef __cplusplus$.*?^#endif$)|(?m:^#.*$)|\bSW_PUBLIC\b")
_INCLUDED = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)
_FUNCTION = re.compile(r"\bSW_FUNCTION\((\w+), (\w+), (\([^()]*\))\)")
"""An entry of functions.h, which becomes a struct's pointer to a function."""
_C_TYPES = {
    torch.float32: "float *",
    torch.bfloat16: "uint16_t *",
    torch.uint16: "uint16_t *",
    torch.int8: "int8_t *",
    torch.uint8: "uint8_t *",
    torch.int32: "int32_t *",
    torch.int64: "int64_t *",
    np.dtype(np.uint8): "uint8_t *",
    np.dtype(np.int32): "int32_t *",
    np.dtype(np.float64): "double *",
}


class Header:
    """The structs and functions of one header, parsed or read on first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._array_types: dict[str, np.dtype[np.void]] = {}
        self._libraries: dict[Path, Any] = {}
        self._ffi: Any = None

    @property
    def ffi(self) -> Any:
        """The cffi interface. Raises NoKernelsError if cffi is not installed."""
        if self._ffi is None:
            self._ffi = _interface(_parsed(self._declarations()))
        return self._ffi

    def load(self, path: Path) -> Any:
        """Load a library built with this header. It stays loaded, and calls release the GIL.

        Raises:
            NoKernelsError: if it cannot be loaded, or its structs differ in size from the header's.
        """
        if self._ffi is None:
            self._ffi = self._kept(path.parent)
        if path not in self._libraries:
            try:
                with loadable(path) as name:
                    library = self.ffi.dlopen(name)
                sizes = {name: library.sw_size_of(name.encode()) for name in self._structs()}
            except (OSError, self.ffi.error) as error:
                raise NoKernelsError(f"the native library {path} cannot be loaded: {error}") from error
            differing = [name for name, size in sizes.items() if size != self.ffi.sizeof(name)]
            if differing:
                raise NoKernelsError(
                    f"the native library {path} cannot be loaded: it was built with another {self._path.name}, whose "
                    f"{', '.join(differing)} have other sizes"
                )
            self._libraries[path] = library
        return self._libraries[path]

    def new(self, struct: str, fields: Mapping[str, Any] | Sequence[Any] = (), /, **named: Any) -> CData:
        """A struct with zero in unnamed fields. The caller must keep alive what its pointers point at."""
        return self.ffi.new(f"{struct} *", fields or named)

    def array(self, item: str, items: Sequence[Any] | int) -> CData:
        """An array of items, structs given as tuples of their fields; or of `items` zeros."""
        return self.ffi.new(f"{item}[]", items)

    def array_type(self, struct: str) -> "np.dtype[np.void]":
        """The struct as a numpy dtype; pointers become integers."""
        if struct not in self._array_types:
            fields = self.ffi.typeof(struct).fields
            layout: Any = {
                "names": [name for name, _ in fields],
                "formats": [_numpy_type(field.type) for _, field in fields],
                "offsets": [field.offset for _, field in fields],
                "itemsize": self.ffi.sizeof(struct),
            }
            self._array_types[struct] = np.dtype(layout)
        return self._array_types[struct]

    def structs_of(self, struct: str, array: NDArray[np.void]) -> CData:
        """View an array of the struct's `array_type` as C structs in the same memory."""
        if array.dtype != self.array_type(struct):
            raise ValueError(f"an array of {array.dtype} has no items of {struct}")
        return self.ffi.from_buffer(f"{struct}[]", array)

    def constants(self, enum: str) -> Mapping[str, int]:
        """The values of an enum by name."""
        values: Mapping[str, int] = self.ffi.typeof(f"enum {enum}").relements
        return values

    def _declarations(self) -> str:
        text = self._path.read_text(encoding="utf-8")
        for name in _INCLUDED.findall(text):
            entries = _FUNCTION.sub(r"\1 (*\2)\3;", (self._path.parent / name).read_text(encoding="utf-8"))
            text = text.replace(f'#include "{name}"', entries)
        return _ONLY_FOR_CPP.sub("", text)

    def _kept(self, folder: Path) -> Any:
        """The interface from a folder of libraries, parsed and written if it is not there."""
        declarations = self._declarations()
        digest = hashlib.sha256(f"{_backend().__version__}\n{declarations}".encode()).hexdigest()[:16]
        kept = folder / f"interface-{digest}.py"
        with contextlib.suppress(OSError), loadable(kept) as name:
            return _interface(unsealed(Path(name)).decode())
        source = _parsed(declarations)
        if folder != PACKAGED:  # which others may use at the same time, and often nobody can write to
            with contextlib.suppress(OSError), opened(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
                written = Path(temporary) / kept.name
                written.write_text(source, encoding="utf-8")
                store(written, kept)
        return _interface(source)

    def _structs(self) -> list[str]:
        """Structs with known fields. cffi ends the process if it is asked for the fields of an opaque one."""
        names = []
        for name in self.ffi.list_types()[0]:
            with contextlib.suppress(self.ffi.error):
                self.ffi.sizeof(name)
                names.append(name)
        return names


CPU = Header(Path(__file__).parent / "cpu" / "samewise.h")
SUFFIX = Header(Path(__file__).parent / "suffix" / "suffix.h")


def pointer(numbers: Tensor | NDArray[Any], *shape: int) -> CData:
    """The address of an array or tensor for a library call, as a C type that cffi checks against the header.

    Raises:
        ValueError: if the shape differs, the memory is not contiguous or not on the CPU, or no library takes the type.
    """
    cffi, c_types = _cffi()
    if isinstance(numbers, Tensor):
        is_plain = numbers.is_contiguous() and numbers.is_cpu
        address: Any = numbers.data_ptr()
    else:
        is_plain = numbers.flags.c_contiguous
        address = cffi.from_buffer(numbers) if is_plain else 0
    if not is_plain or numbers.shape != shape or (c_type := c_types.get(numbers.dtype)) is None:
        raise ValueError(
            f"the native kernels take contiguous numbers {list(shape)} on the CPU, but these are {numbers.dtype} "
            f"{list(numbers.shape)}{'' if is_plain else ', elsewhere or not contiguous'}"
        )
    return cffi.cast(c_type, address)


@cache
def _cffi() -> tuple[Any, Mapping[Any, Any]]:
    """A cffi instance to convert addresses with, and the pointer type of each dtype."""
    ffi = _backend().FFI()
    return ffi, {dtype: ffi.typeof(name) for dtype, name in _C_TYPES.items()}


def _backend() -> Any:
    """The part of cffi that parses no declarations. Raises NoKernelsError if cffi is not installed."""
    try:
        import _cffi_backend  # noqa: PLC0415  (a machine that only measures a GPU may lack it)
    except ImportError as error:
        raise NoKernelsError("the native libraries need the package cffi, which is not installed") from error
    return _cffi_backend


def _parsed(declarations: str) -> str:
    """Declarations in C as Python code that needs no parser for C."""
    _backend()
    from cffi import FFI, recompiler  # noqa: PLC0415  (only where nothing is kept)

    ffi = FFI()
    ffi.cdef(declarations)
    ffi.set_source("interface", None)
    written = io.StringIO()
    recompiler.make_py_source(ffi, "interface", written)  # FFI.emit_python_code prints
    return written.getvalue()


def _interface(source: str) -> Any:
    """The cffi interface that such code makes."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["ffi"]


def _numpy_type(c_type: Any) -> str:
    return "uintp" if c_type.kind == "pointer" else c_type.cname.removesuffix("_t").replace("double", "float64")
