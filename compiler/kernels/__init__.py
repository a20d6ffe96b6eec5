"""The registry of kernel families: one package each, listed here and nowhere else."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem, Strategy, any_inputs
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from ptxflow.compiler.kernels.dsa_sparse import DSA_SPARSE
from ptxflow.compiler.kernels.gdn_decode import GDN_DECODE
from ptxflow.compiler.kernels.gdn_prefill import GDN_PREFILL
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.compiler.kernels.gemm_epilogue import GEMM_EPILOGUE
from ptxflow.compiler.kernels.gemm_fp8 import GEMM_FP8
from ptxflow.compiler.kernels.gqa_decode import GQA_DECODE
from ptxflow.compiler.kernels.gqa_prefill import GQA_PREFILL
from ptxflow.compiler.kernels.mla import MLA_DECODE, MLA_PREFILL
from ptxflow.compiler.kernels.moe import MOE
from ptxflow.compiler.kernels.rmsnorm import RMSNORM
from ptxflow.compiler.kernels.sampling import SAMPLING
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.lower import chained

FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family to the registry.

    Raises ValueError for a second family of the same name, or of the same op type where one of the
    two accepts any inputs.
    """
    if family.name in FAMILIES:
        raise ValueError(f"family {family.name!r} is registered twice")
    for other in FAMILIES.values():
        shared = set(other.op_types) & set(family.op_types)
        if shared and any_inputs in (other.accepts, family.accepts):
            raise ValueError(f"families {other.name!r} and {family.name!r} both claim {shared}")
    build, launch = partial(_built, family.build), partial(_launched, family.launch)
    FAMILIES[family.name] = replace(family, build=build, launch=launch)


def _built(
    build: Callable[[Problem, Strategy, Device], Statement], p: Problem, s: Strategy, device: Device
) -> Statement:
    """What a family builds, chained where the problem is."""
    kernel = build(p, s, device)
    return kernel if p.chained is None else chained(kernel, p.chained)


def _launched(
    launch: Callable[[Problem, Strategy, Device], Launch], p: Problem, s: Strategy, device: Device
) -> Launch:
    found = launch(p, s, device)
    return found if p.chained is None else replace(found, dependent=True)


def family(name: str) -> Family:
    """The family of that name. Raises KeyError, which lists the known names."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise KeyError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}") from None


def family_for(op_type: str, inputs: Collection[str] = ()) -> Family:
    """The family that builds kernels for a definition of an op type.

    `inputs` are the names of the definition's inputs: families of one op type differ in which of
    them they accept. Raises KeyError, which lists the op types that are built.
    """
    for candidate in FAMILIES.values():
        if op_type in candidate.op_types and candidate.accepts(inputs):
            return candidate
    known = sorted({t for f in FAMILIES.values() for t in f.op_types})
    raise KeyError(
        f"no kernel family builds op type {op_type!r} yet; supported: {', '.join(known)}"
        if op_type not in known
        else f"no kernel family builds op type {op_type!r} from {', '.join(inputs)} yet"
    )


for _family in (
    DSA_INDEXER,
    MLA_DECODE,
    MLA_PREFILL,
    DSA_SPARSE,
    GDN_DECODE,
    GDN_PREFILL,
    GEMM,
    GEMM_EPILOGUE,
    GEMM_FP8,
    GQA_DECODE,
    GQA_PREFILL,
    MOE,
    RMSNORM,
    SAMPLING,
):
    register(_family)
