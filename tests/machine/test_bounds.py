"""Direct accesses to global memory: kernels pass, and what ends behind a tensor is refused."""

import re

import pytest

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.check import check_bounds
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import Op, Statement, body_of, const, kernels_of, program, show, with_body
from tests.families import ROWS
from tests.given import BOTH

#: families, by the first words of a structure whose output is stored directly, behind guards
DIRECT = {"gemm": "direct,", "gemm_epilogue": "swapped, bias", "gemm_fp8": "swapped",
          "rmsnorm": "", "sampling": "", "dsa_sparse": "whole lists", "gqa_decode": "a ring of two",
          "mla_decode": "chunks"}  # fmt: skip
FAULTS = ("nothing", "an element behind", "no guard", "a stride twice")


def planted(tree: Statement, fault: str) -> Statement:
    """A kernel all of whose direct accesses have the fault."""
    if tree.op is not Op.ATOM:
        return with_body(tree, tuple(planted(node, fault) for node in body_of(tree)))
    names = [name for name, _ in atom(tree.arg.atom).operands]
    given = dict(zip(names, tree.src, strict=True))
    if not {"base", "index"} <= given.keys():
        return tree
    if fault == "no guard" and "inside" in given:
        given["inside"] = const(1)
    elif fault.startswith("rows") and given.get("inside", const(1)).op is Op.ALU:
        row, end = given["inside"].src  # those that are so far from a multiple of the tile's
        if show(row).endswith(f" add {fault.split()[1]})"):
            given["inside"] = row < end + 1
    elif fault in FAULTS:
        given["index"] = given["index"] + 1 if fault == "an element behind" else given["index"] * 2
    return Statement(Op.ATOM, tuple(given.values()), tree.arg, tree.site)


def checked(family: str, words: str, device: Device, fault: str = "nothing") -> str:
    """What the check says of the first case of a family whose name begins with these words."""
    row = next(row for row in ROWS if row.family.name == family)
    case = next(c for c in row.cases if c.device is device and c.name.startswith(words))
    p, s, maker = case.problem, case.strategy, row.family
    kernels = kernels_of(maker.build(p, s, device))
    if fault != "nothing":
        kernels = tuple(planted(kernel, fault) for kernel in kernels)
    launch = maker.launch(p, s, device)
    return "\n".join(check_bounds(program(*kernels), launch, dict(p.axes), maker.held))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("device", BOTH, ids=lambda d: d.arch)
@pytest.mark.parametrize("family", DIRECT)
def test_what_ends_behind_a_tensor_is_refused(family: str, device: Device, fault: str) -> None:
    if fault == "nothing":
        for line in checked(family, DIRECT[family], device).splitlines():
            assert re.search(r": (\d+) of \1 direct accesses end inside", line), line
        return
    said = r" at compiler/\S+ reaches byte \d+ of \w+, which has \d+ at .*; fix: "
    with pytest.raises(SpecError, match=said):
        checked(family, DIRECT[family], device, fault)


@pytest.mark.parametrize("row", [1, 8])
@pytest.mark.parametrize("device", BOTH, ids=lambda d: d.arch)
def test_one_guard_of_one_more_is_refused(device: Device, row: int) -> None:
    """A tile's rows are in registers: each reaches the last row of sizes of its own."""
    with pytest.raises(SpecError, match=r"byte \d+ of A_scale"):
        checked("gemm_fp8", "swapped", device, f"rows {row}")


@pytest.mark.parametrize("device", BOTH, ids=lambda d: d.arch)
def test_what_a_bound_rests_on_is_said(device: Device) -> None:
    said = checked("gqa_decode", "a ring of two, pages of 1", device)
    assert "not bounded" not in said and "kv_indices below num_pages" in said
    assert "kv_indptr ascending to num_kv_indices" in said
    assert "sparse_indices below num_pages * page_size or -1" in checked("dsa_sparse", "", device)
    assert "where entries" not in checked("rmsnorm", "", device)
    assert "; not bounded: " in checked("moe", "", device)
