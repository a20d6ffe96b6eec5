"""Every atom that the compiler can emit is one that the emulator builds, in every form."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ptxflow.compiler.atoms import Atom, all_atoms
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import PtxSyntaxError
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import parse
from ptxflow.compiler.ir import Op, Use, kernels_of, walk
from ptxflow.compiler.kernels import family
from tests.families import dsa_indexer, moe

FORMS: dict[str, tuple[Any, ...]] = {  # of attributes; the others have one value below
    "dtype": ("f16", "bf16"),
    "cta_group": (1, 2),
    "direction": ("inc", "dec"),
    "mask": (0, 3),
    "n": (8, 64, 256),
    "shape": ("32x32b", "16x256b"),
}
HINTS: dict[str, tuple[Any, ...]] = {  # of loads and stores that have defaults for them
    "cache": ("", "L1::no_allocate", "L1::evict_first", "L1::evict_last"),
    "offset": (0, 128),
    "prefetch": (0, 256),
    "copies": (1, 4),
    "rounding": ("rni", "rzi"),
    "whole": (False, True),
    "acquire": ("", ".acquire.cluster"),
    "order": ("relaxed", "release"),
    "mask": (0, 3),
    "first": (None, 0),
    "size": (4, 16),
}
ATTRIBUTES = {
    "uid": 1, "bytes": 1024, "pending": 0, "registers": 40, "columns": 64, "idesc": 0x8100010,
    "id": 1, "threads": 128, "element": 2, "split": 0,
    "box": (64, 8), "leader": True, "pipe": "bulk", "lanes": 16, "factor": 0x3A800000,
    "shift": 8, "bits": 9, "size": 128, "vector": 4, "quantity": "mass", "warps": 8,
    "runs": 16, "slots": 64, "vocab": 1000, "group": 4, "peers": 2,
    "summand": 0x358637BD, "most": 127, "pitch": 2048, "operation": "add",
}  # fmt: skip
KINDS = {"smem": "%r1+16", "mbar": "%r2", "map": "%rd1", "desc": "%rd2", "tmem": "%r3"}
COUNTS = {
    ("pack", "src"): 8, ("st_global_narrow", "src"): 1, ("movmatrix", "dst"): 1,
    ("movmatrix", "src"): 1, ("unpack", "dst"): 8,
    ("ld_global_narrow", "dst"): 1,
    ("exp2_rows", "scale"): 1, ("shift_exp2", "scale"): 1, ("mma_16816", "b"): 2,
    ("shuffle_from", "dst"): 1, ("shuffle_from", "src"): 1, ("count_lanes", "dst"): 1,
    ("scale_f32", "b"): 1, ("st_shared", "src"): 1,
}  # fmt: skip
COUNTS |= {
    (name, operand): 1
    for name in ("either", "weigh", "popc", "ballot", "scan_lanes", "reduce_lanes", "first_lane")
    for operand in ("dst", "src")
}
#: of the atoms that count, choose and draw: registers of an operand, 1 where nothing is said
SINGLE = {
    "choose", "sift",
}  # fmt: skip
COUNTS |= {("sift", "src"): 8}
COUNTS |= {(name, "window"): 2 for name in SINGLE}
VALUES = {"accumulate": "%p1", "inside": "%p1", "base": "%rd3"}
MODULE = """
.version 8.8
.target {arch}
.address_size 64
.visible .entry test(.param .u64 out)
{{
    .reg .pred %p<2>, %pw;
    .reg .b16 %rh;
    .reg .b32 %r<9>, %f<256>, %ra, %rb, %tmem, %lane;
    .reg .b64 %rd<9>, %rda;
    {text}
    ret;
}}
"""


def forms(row: Atom) -> list[str]:
    """Its text for every combination of what its form depends on."""
    names, hinted = list(FORMS), [name for name in HINTS if name in dict(row.defaults)]
    texts: dict[str, None] = {}
    hints = list(itertools.product(*(HINTS[name] for name in hinted)))
    counts = (1, 2, 4) if row.name in ("st_global", "ld_global") else (4,)
    for chosen in itertools.product(*FORMS.values()):
        attributes = ATTRIBUTES | dict(zip(names, chosen, strict=True)) | dict(row.defaults)
        for count, hint in itertools.product(counts, hints):
            given = attributes | dict(zip(hinted, hint, strict=True))
            texts[_text(row, given, count)] = None
    return list(texts)


def _text(row: Atom, attributes: dict[str, Any], count: int) -> str:
    operands: dict[str, Any] = dict(attributes)
    sources = []
    for name, kind in row.operands:
        wide = {(name, "acc"): attributes["n"] // 2 for name in ("wgmma", "wgmma_registers")}
        told = 1 if row.name in SINGLE else count
        registers = (COUNTS | wide).get((row.name, name), told)
        if kind == "frag":
            held = ", ".join(f"%f{i}" for i in range(registers))
        else:
            held = VALUES.get(name, "%r4") if kind == "value" else KINDS.get(kind, "%r5")
        operands |= {name: held, f"{name}_reg": held.split("+")[0]}
        storage = SimpleNamespace(arg=SimpleNamespace(count=1, dtype="f32"))
        sources.append(SimpleNamespace(arg=registers, src=(storage,)))
    use: Any = SimpleNamespace(arg=Use(row.name, tuple(attributes.items())), src=sources)
    return row.ptx(use, operands) if callable(row.ptx) else row.ptx.format_map(operands)


#: operands whose sizes hang together, or attributes of one family: known from its kernels
IN_KERNELS = {
    "promote", "sort_key", "gather_entries", "outrank", "put_place",
}  # fmt: skip
GENERIC = [row for row in all_atoms() if row.name not in IN_KERNELS]


@pytest.mark.slow
def test_atoms_of_one_family_are_known_in_all_its_kernels() -> None:
    seen = set[str]()
    for case in (*moe.ROW.cases, *dsa_indexer.ROW.cases):
        if (p := case.emulated) is None:
            continue
        for kernel in kernels_of(family(p.family).build(p, case.strategy, case.device)):
            seen |= {node.arg.atom for _, node in walk(kernel) if node.op is Op.ATOM}
            assert Program(parse(write(kernel, case.device))).code
    assert seen >= IN_KERNELS


@pytest.mark.parametrize("row", GENERIC, ids=lambda row: row.name)
def test_every_form_of_an_atom_is_known(row: Atom) -> None:
    for arch, text in itertools.product(row.archs, forms(row)):
        if arch == "sm_90a" and "cta_group" in text:  # of an attribute that the validator refuses
            continue
        if "16x256b" in text:  # four registers are one repetition
            text = text.replace(".x4.", ".x1.")
        assert Program(parse(MODULE.format(arch=arch, text=text))).code


def test_an_unknown_form_is_refused() -> None:
    text = MODULE.format(arch="sm_90a", text="mbarrier.arrive.release.gpu.shared.b64 _, [%r1];")
    with pytest.raises(PtxSyntaxError, match="unknown instruction `mbarrier"):
        Program(parse(text))
