"""Checkpoints: one safetensors file, tensors by name and the configuration as JSON in its header.

No pickle. A file is written beside its place and moved there, so that what lies there is whole, and
says its digest, so that what is read is what was written.
Everything wrong with one raises `CheckpointError`, whose message is one line.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ptxflow.command import BadInput
from ptxflow.compiler.files import write_whole
from ptxflow.env.digest import DamagedError, checked, sealed
from ptxflow.gfn.hints import settings
from ptxflow.gfn.network import FamilyShape, NetworkConfig

FORMAT = 2
KEY = "ptxflow"
HEADER_LIMIT = 100 * 10**6  # bytes, of the safetensors format


class CheckpointError(BadInput):
    """A checkpoint that cannot be used; the message is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """`network` fixes the parameters; `config` is JSON data of whoever wrote the file."""

    network: NetworkConfig
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        start = prefix + "."
        return {k[len(start) :]: v for k, v in self.tensors.items() if k.startswith(start)}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically; OSError where the folder cannot be written."""
    header = {
        "format": FORMAT,
        "network": checkpoint.network.to_json(),
        "config": checkpoint.config,
    }
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    write_whole(path, sealed(save(tensors, metadata={KEY: json.dumps(header)})))


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError says what is wrong with the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot read the checkpoint: {reason}") from None
    header = _header(path, data)
    try:
        tensors = load(data)
        about = json.loads(header["__metadata__"][KEY])
        if about["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format {about['format']}; this version reads {FORMAT}"
            )
        checked(data)
        return Checkpoint(NetworkConfig.from_json(about["network"]), about["config"], tensors)
    except (SafetensorError, DamagedError) as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged: {error}") from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise CheckpointError(f"{path}: safetensors, but not a ptxflow checkpoint of now") from None


def _header(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON header of a safetensors file, after checking that the file is whole."""
    if len(data) < 8:
        raise CheckpointError(f"{path}: the checkpoint is truncated: {len(data)} bytes")
    (size,) = struct.unpack("<Q", data[:8])
    if size > HEADER_LIMIT or data[8:9] not in (b"{", b""):
        raise CheckpointError(f"{path}: not a safetensors file")
    if 8 + size > len(data):
        raise CheckpointError(
            f"{path}: the checkpoint is truncated: {len(data)} bytes, the header alone takes "
            f"{8 + size}"
        )
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        ends = [t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise CheckpointError(f"{path}: not a safetensors file") from None
    whole = 8 + size + max(ends, default=0)
    if whole > len(data):
        raise CheckpointError(f"{path}: the checkpoint is truncated: {len(data)} of {whole} bytes")
    return header


def require_space(where: object, config: NetworkConfig, family: FamilyShape) -> None:
    """CheckpointError unless the network was made for this decision space and these features."""
    known = {p.shape.name: p for p in config.policies}
    if family.name not in known:
        raise CheckpointError(
            f"{where}: the checkpoint has no family {family.name!r}; it has {', '.join(known)}"
        )
    policy = known[family.name]
    held = policy.shape
    if (held.sizes, held.digest) != (family.sizes, family.digest):
        raise CheckpointError(
            f"{where}: the checkpoint is of another decision space of {family.name!r} "
            f"({held.digest}, now {family.digest}): train it anew"
        )
    if held.features != family.features:
        differing = sorted({*held.features} ^ {*family.features}) or ["their order"]
        raise CheckpointError(
            f"{where}: the checkpoint was trained on other features of {family.name!r} "
            f"({', '.join(differing[:4])}): train it anew"
        )
    if policy.knowing and policy.asked != settings(policy.knowing):
        raise CheckpointError(
            f"{where}: the checkpoint's policy of {family.name!r} was told what another search "
            "finds: train it anew"
        )
