"""Surrogates on disk: one safetensors file, the arrays by name and the rest as JSON in its header.

A file is written beside its place and moved there, and says its digest. One that is damaged, or
whose features are not what today's decisions, loads and rates give, raises `SurrogateError`, whose
message is one line.
"""

import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ptxflow.compiler import kernels
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.family import Problem
from ptxflow.compiler.files import write_whole
from ptxflow.env.digest import DamagedError, checked, sealed
from ptxflow.env.observations import Observations
from ptxflow.env.surrogate import (
    AXIS,
    Ensemble,
    Probe,
    Surrogate,
    SurrogateError,
    matrix,
    strategy_features,
)

FORMAT, KEY = 1, "ptxflow-surrogate"
TOLERANCE = 1e-3  # of a feature between machines; changed costs move logs by more
ARRAYS = ("center", "gain", "precision", "level")  # of the ensemble


def write(path: Path, surrogate: Surrogate) -> None:
    """Write atomically; OSError where the folder cannot be written."""
    header: dict[str, Any] = {
        "format": FORMAT,
        "family": surrogate.family.name,
        "wide": bool(surrogate.family.implied),
        "device": surrogate.device.name,
        "features": surrogate.features,
        "problems": [
            {k: v for k, v in asdict(p.problem).items() if k != "chained"} for p in surrogate.probes
        ],
        "about": surrogate.about,
        "kappa": surrogate.kappa,
        "reach": surrogate.ensemble.reach,
        "prior": surrogate.ensemble.prior,
    }
    tensors = {name: getattr(surrogate.ensemble, name) for name in ARRAYS}
    for i, (weight, bias) in enumerate(surrogate.ensemble.layers):
        tensors |= {f"layer.{i}.weight": weight, f"layer.{i}.bias": bias}
    for i, probe in enumerate(surrogate.probes):
        tensors |= {f"probe.{i}.codes": probe.codes, f"probe.{i}.values": probe.values}
    data = save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, {KEY: json.dumps(header)})
    write_whole(path, sealed(data))


def family_of(path: Path) -> str:
    """The family of a surrogate, from its header alone; SurrogateError says what is wrong."""
    data = _bytes(path)
    try:
        return str(_about(data)["family"])
    except (ValueError, struct.error):
        raise SurrogateError(f"{path}: the surrogate is damaged") from None
    except (KeyError, TypeError):
        raise SurrogateError(f"{path}: a safetensors file, but not a surrogate") from None


def read(path: Path) -> Surrogate:
    """Read a surrogate and check it against the present code; SurrogateError says what is wrong."""
    data = _bytes(path)
    try:
        tensors = load(data)
        about = _about(data)
        if about["format"] != FORMAT:
            raise SurrogateError(
                f"{path}: surrogate format {about['format']}; this version reads {FORMAT}"
            )
        surrogate = _build(about, tensors, checked(data)[:16])
    except (SafetensorError, DamagedError) as error:
        raise SurrogateError(f"{path}: the surrogate is damaged: {error}") from None
    except SurrogateError:
        raise
    except (KeyError, TypeError, ValueError, struct.error):
        raise SurrogateError(f"{path}: a safetensors file, but not a surrogate") from None
    require_features(path, surrogate)
    return surrogate


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise SurrogateError(f"{path}: cannot read the surrogate: {reason}") from None


def _about(data: bytes) -> dict[str, Any]:
    """What the header of a file's bytes says of a surrogate; KeyError where it is of none."""
    (size,) = struct.unpack("<Q", data[:8])
    about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
    return about


def _build(about: dict[str, Any], tensors: dict[str, Any], digest: str) -> Surrogate:
    layers = sum(name.endswith(".weight") for name in tensors)
    problems = [
        Problem(**p | {key: tuple(map(tuple, p.get(key, ()))) for key in ("axes", "constants")})
        for p in about["problems"]
    ]
    family = kernels.family(about["family"])
    ensemble = Ensemble(
        layers=tuple(
            (tensors[f"layer.{i}.weight"], tensors[f"layer.{i}.bias"]) for i in range(layers)
        ),
        **{name: tensors[name] for name in ARRAYS},
        reach=float(about["reach"]),
        prior=float(about["prior"]),
    )
    return Surrogate(
        family=family.wide if about.get("wide") else family,
        device=DEVICES[about["device"]],
        features=tuple(about["features"]),
        ensemble=ensemble,
        kappa=float(about["kappa"]),
        probes=tuple(
            Probe(p, tensors[f"probe.{i}.codes"], tensors[f"probe.{i}.values"])
            for i, p in enumerate(problems)
        ),
        about=about["about"],
        digest=digest,
    )


def require_features(where: object, surrogate: Surrogate) -> None:
    """SurrogateError unless today's code gives the features that the surrogate was fitted on.

    Names tell of changed decisions and choices; values, on the probes, of changed costs.
    """
    for probe in surrogate.probes:
        none = np.zeros(len(probe.codes))
        held = Observations(surrogate.family, probe.problem, surrogate.device, probe.codes, none)
        columns, _ = strategy_features(
            surrogate.family, held.fields(), probe.problem, surrogate.device
        )
        lacking = {n for n in set(surrogate.features) - set(columns) if not n.startswith(AXIS)}
        if differing := set(columns) - set(surrogate.features) | lacking:
            raise SurrogateError(
                f"{where}: the surrogate is of other decisions or features "
                f"({_some(sorted(differing))}): fit it anew"
            )
        moved = np.abs(matrix(columns, surrogate.features) - probe.values).max(0) > TOLERANCE
        if moved.any():
            names = [n for n, m in zip(surrogate.features, moved, strict=True) if m]
            raise SurrogateError(
                f"{where}: the cost model has changed since the surrogate was fitted "
                f"({_some(names)}): fit it anew"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
