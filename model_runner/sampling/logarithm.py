"""The natural logarithm with the same bits on every machine, as kernels/cpu/double_math.h computes it.

Python's and numpy's use the C library's or vector units' own, whose last bit depends on the processor. These consist of
additions, products and quotients, which IEEE 754 rounds alike everywhere. Errors are below one unit in the last place.
"""

import math

import numpy as np
from numpy.typing import NDArray

_LEAST = math.sqrt(0.5)
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10


def logs(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithms of positive, finite numbers."""
    mantissas, exponents = np.frexp(x)
    is_low = mantissas < _LEAST
    return _log_of(mantissas * (1.0 + is_low), (exponents - is_low).astype(np.float64))


def _log_of(m: NDArray[np.float64], n: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of 2**n * m, with m between sqrt(1/2) and sqrt(2)."""
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    half = 0.5 * f * f
    p = z * (2.0 / 21) + 2.0 / 19
    p = p * z + 2.0 / 17
    p = p * z + 2.0 / 15
    p = p * z + 2.0 / 13
    p = p * z + 2.0 / 11
    p = p * z + 2.0 / 9
    p = p * z + 2.0 / 7
    p = p * z + 2.0 / 5
    p = p * z + 2.0 / 3
    return n * _LN2_HIGH - ((half - (s * (half + p * z) + n * _LN2_LOW)) - f)
