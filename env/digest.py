"""A safetensors file that says its own SHA-256, so that no flipped bit is taken for a weight.

The digest is the first entry of the header's metadata, and is that of the same file without the
entry: tensors, shapes, names and whatever else the header says.
"""

import hashlib
import re
import struct

BEGIN = b'{"__metadata__":{'
OURS = b'"ptxflow'  # how the names of our own entries begin
ENTRY = b'"sha256":"%s",    '  # a multiple of 8 bytes, to which headers are padded
FORM = re.compile(re.escape(BEGIN) + rb'"sha256":"([0-9a-f]{64})",    ')


class DamagedError(ValueError):
    """A file that is not what was written."""


def sealed(data: bytes) -> bytes:
    """A safetensors file of ours with its digest, which it has not yet."""
    if not data.startswith(BEGIN + OURS, 8):
        raise ValueError("the file has metadata of others, or a digest already")
    (size,) = struct.unpack("<Q", data[:8])
    entry = ENTRY % hashlib.sha256(data).hexdigest().encode()
    return struct.pack("<Q", size + len(entry)) + BEGIN + entry + data[8 + len(BEGIN) :]


def checked(data: bytes) -> str:
    """The digest of a whole file of ours; DamagedError where that is not what the file says, or it
    says none."""
    found = FORM.match(data, 8)
    if not found:
        raise DamagedError("its digest cannot be read")
    (size,) = struct.unpack("<Q", data[:8])
    bare = struct.pack("<Q", size + 8 + len(BEGIN) - found.end()) + BEGIN + data[found.end() :]
    digest = hashlib.sha256(bare).hexdigest()
    if digest.encode() != found[1]:
        raise DamagedError("its bytes do not have the digest that it says")
    return digest
