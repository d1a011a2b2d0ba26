"""The C interfaces of the native libraries, read from their headers; nothing of them is declared again in Python."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.build import NoKernelsError

CData: TypeAlias = Any
"""A C value of cffi: a pointer, an array or a struct. It owns its own memory, not the memory that it points at."""
_ONLY_FOR_CPP = re.compile(r"(?ms:^#ifdef __cplusplus$.*?^#endif$)|(?m:^#.*$)|\bSW_PUBLIC\b")
_C_TYPES = {
    torch.float32: "float *",
    torch.bfloat16: "uint16_t *",
    torch.int8: "int8_t *",
    torch.int32: "int32_t *",
    torch.int64: "int64_t *",
    np.dtype(np.int32): "int32_t *",
    np.dtype(np.float64): "double *",
}


class Header:
    """The structs and functions of one header, which is read at first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._array_types: dict[str, np.dtype[np.void]] = {}
        self._libraries: dict[Path, Any] = {}
        self._ffi: Any = None

    @property
    def ffi(self) -> Any:
        """What cffi made of the header. Raises NoKernelsError without cffi."""
        if self._ffi is None:
            ffi = _new_ffi()
            ffi.cdef(_ONLY_FOR_CPP.sub("", self._path.read_text(encoding="utf-8")))
            self._ffi = ffi
        return self._ffi

    def load(self, path: Path) -> Any:
        """A library that was built with the header. It stays loaded; calls release the interpreter's lock.

        Raises:
            NoKernelsError: if it cannot be loaded, or its structs have other sizes than the header's.
        """
        if path not in self._libraries:
            try:
                library = self.ffi.dlopen(str(path))
                sizes = {name: library.sw_size_of(name.encode()) for name in self._structs()}
            except (OSError, AttributeError) as error:
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
        """A struct, zero where no field is given. What its pointers point at must be kept alive by the caller."""
        return self.ffi.new(f"{struct} *", fields or named)

    def array(self, item: str, items: Sequence[Any] | int) -> CData:
        """An array of items, structs as tuples of their fields among them, or of so many zeros."""
        return self.ffi.new(f"{item}[]", items)

    def array_type(self, struct: str) -> "np.dtype[np.void]":
        """The struct as an item of numpy arrays; pointers are numbers in it."""
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
        """The items of an array of the struct's `array_type`, in the same memory."""
        if array.dtype != self.array_type(struct):
            raise ValueError(f"an array of {array.dtype} has no items of {struct}")
        return self.ffi.from_buffer(f"{struct}[]", array)

    def constants(self, enum: str) -> Mapping[str, int]:
        """The values of an enum by their names."""
        values: Mapping[str, int] = self.ffi.typeof(f"enum {enum}").relements
        return values

    def _structs(self) -> list[str]:
        names = self.ffi.list_types()[0]
        return [name for name in names if self.ffi.typeof(name).fields is not None]


CPU = Header(Path(__file__).parent / "cpu" / "samewise.h")
SUFFIX = Header(Path(__file__).parent / "suffix" / "suffix.h")


def pointer(numbers: Tensor | NDArray[Any], *shape: int) -> CData:
    """The address of numbers that a library reads or writes, in a C type by which it is checked against the header.

    Raises:
        ValueError: if they are not of this shape, contiguous and on the CPU, or of a type that no library takes.
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
    """What makes C values of addresses, and the pointers to numbers of a type."""
    ffi = _new_ffi()
    return ffi, {dtype: ffi.typeof(name) for dtype, name in _C_TYPES.items()}


def _new_ffi() -> Any:
    try:
        from cffi import FFI  # noqa: PLC0415  (a machine that only measures a GPU may lack it)
    except ImportError as error:
        raise NoKernelsError("the native libraries need the package cffi, which is not installed") from error
    return FFI()


def _numpy_type(c_type: Any) -> str:
    return "uintp" if c_type.kind == "pointer" else c_type.cname.removesuffix("_t").replace("double", "float64")
