"""The format of the two messages of a window, OPEN and CLOSE.

Both have one fixed size: a header of flags, window number and signature (numbers stand there with their complements, so
that a bitwise OR shows whether ranks sent different ones), then one byte a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final


class Flag:
    """Bits of the first byte of a message. Plain integers: those of ``enum`` cost a microsecond an operation."""

    OPEN: Final = 1
    CLOSE: Final = 2
    NESTED: Final = 4
    FAILED: Final = 8
    SEEN: Final = 16  # the backward began at an output of the wrapper
    GUESSED: Final = 32  # it began at a parameter, while a forward was open whose outputs were all in sight
    CHANGED: Final = 64  # the graph is not the one of the first backward, though it was promised to be


# Bits of a parameter's byte in OPEN ...
EXPECTED, CARRIED, DECLARED, NEEDED, LACKING = 1, 2, 4, 8, 16
# ... and in CLOSE.
PROMISED, TOUCHED, LATE = 1, 2, 4

HEADER_BYTES = 11  # flags, window, signature, complements of both


def _table(test: Callable[[int], object]) -> bytes:
    """A table for ``bytes.translate``: 1 where ``test`` holds for the byte."""
    return bytes(1 if test(byte) else 0 for byte in range(256))


IS_AGREED: Final = _table(lambda b: b & (EXPECTED | CARRIED))
IS_DISPUTED: Final = _table(lambda b: b & DECLARED and b & NEEDED)
IS_UNEVEN: Final = _table(lambda b: b & (EXPECTED | CARRIED) and b & LACKING)
IS_TOUCHED: Final = _table(lambda b: b & (TOUCHED | LATE))
IS_LATE: Final = _table(lambda b: b & LATE)
IS_UNMET: Final = _table(lambda b: b & PROMISED and not b & (TOUCHED | LATE))


def indices_of(flags: bytes) -> tuple[int, ...]:
    """The positions of the bytes that are not 0."""
    return tuple(i for i, flag in enumerate(flags) if flag) if any(flags) else ()


def flags_of(param_indices: Collection[int], num_params: int) -> bytes:
    """One byte a parameter: 1 for those named."""
    flags = bytearray(num_params)
    for i in param_indices:
        flags[i] = 1
    return bytes(flags)
