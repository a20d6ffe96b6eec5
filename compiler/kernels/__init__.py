"""The registry of kernel families: one module each, found here and nowhere else."""

from __future__ import annotations

from collections.abc import Collection

from ptxflow.compiler.family import Family, any_inputs

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; a second one of the same name, or for the same op type and any inputs, is an
    error."""
    if family.name in _FAMILIES:
        raise ValueError(f"family {family.name!r} is registered twice")
    for other in _FAMILIES.values():
        shared = set(other.op_types) & set(family.op_types)
        if shared and any_inputs in (other.accepts, family.accepts):
            raise ValueError(f"families {other.name!r} and {family.name!r} both claim {shared}")
    _FAMILIES[family.name] = family
    return family


def family(name: str) -> Family:
    """The family of that name; unknown names raise KeyError and list the known ones."""
    _load()
    try:
        return _FAMILIES[name]
    except KeyError:
        raise KeyError(f"unknown family {name!r}; known: {', '.join(sorted(_FAMILIES))}") from None


def family_for(op_type: str, inputs: Collection[str] = ()) -> Family:
    """The family that builds kernels for a definition of that op type with these inputs."""
    _load()
    for candidate in _FAMILIES.values():
        if op_type in candidate.op_types and candidate.accepts(inputs):
            return candidate
    known = sorted({t for f in _FAMILIES.values() for t in f.op_types})
    raise KeyError(
        f"no kernel family builds op type {op_type!r} yet; supported: {', '.join(known)}"
        if op_type not in known
        else f"no kernel family builds op type {op_type!r} from {', '.join(inputs)} yet"
    )


def _load() -> None:
    from ptxflow.compiler.kernels import (  # noqa: F401  each registers itself
        dsa_indexer,
        dsa_sparse,
        gdn_decode,
        gdn_prefill,
        gemm,
        gqa_decode,
        gqa_prefill,
        mla,
        moe,
        rmsnorm,
        sampling,
    )
