"""Numbers of a PTX text."""

import re
import struct
from contextlib import suppress

_NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?$")


def number(text: str, real: str = "<f") -> int | None:
    """The value of an integer literal, or the bits of a 0f or 0d one; None for anything else.

    `real` is the type of a decimal fraction: <f or <d."""
    if len(text) > 80:
        return None
    match = _NUMBER.match(text)
    if match:
        digits = match[2]
        octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        if octal and not set(digits) <= set("01234567"):
            return None
        value = int(digits, 8 if octal else 0)
        return -value if match[1] else value
    if re.match(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$", text):
        return int(text[2:], 16)
    if re.match(r"-?\d+\.\d*$", text):
        with suppress(OverflowError):  # beyond the type
            return int.from_bytes(struct.pack(real, float(text)), "little")
    return None
