"""What runs cover of a text, and emulation problems that are chosen by it."""

import numpy as np
import pytest

from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.emulator.coverage import Coverage, skeleton
from ptxflow.compiler.launch import Launch, PointerParam, ScalarParam
from ptxflow.eval.verify.trials import cover
from tests.families.gemm import CASES, problem_for

KERNEL = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry count(.param .u64 out, .param .u32 n)
.reqntid 32, 1, 1
{
	.reg .b32 %r<8>;
	.reg .b64 %rd<3>;
	.reg .pred %p<4>;
	ld.param.u64 %rd0, [out];
	ld.param.u32 %r0, [n];
	mov.u32 %r1, 0;
	mov.u32 %r2, %tid.x;
	setp.ge.u32 %p0, %r1, %r0;
	@%p0 bra DONE;
LOOP:
	shr.u32 %r3, %r1, 2;
	add.u32 %r2, %r2, %r3;
	add.u32 %r1, %r1, 1;
	setp.lt.u32 %p1, %r1, %r0;
	@%p1 bra LOOP;
DONE:
	setp.gt.u32 %p2, %r0, 7;
	@%p2 add.u32 %r2, %r2, 1;
	mov.u32 %r4, %tid.x;
	mad.wide.u32 %rd1, %r4, 4, %rd0;
	st.global.b32 [%rd1], %r2;
	ret;
}
"""
LAUNCH = Launch(
    "count", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("out"), ScalarParam("n", "n"))
)


def covered(*sizes: int) -> Coverage:
    found = [
        emulate(KERNEL, LAUNCH, {"out": np.zeros(32, np.uint32)}, {"n": n}).coverage["count"]
        for n in sizes
    ]
    for other in found[1:]:
        found[0].add(other)
    return found[0]


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ((0,), {"instruction", "false", "true"}),
        ((2,), {"digit", "trips", "true", "instruction"}),
        ((5,), {"trips", "true", "instruction"}),
        ((0, 3, 5), {"instruction", "true", "last"}),
        ((0, 3, 9), {"last", "bound"}),
        ((0, 1, 7, 8), set()),
    ],
)
def test_gaps_of_a_loop(sizes: tuple[int, ...], kinds: set[str]) -> None:
    gaps = list(covered(*sizes).gaps("count"))
    assert {g.kind for g in gaps} == kinds
    guarded = [g for g in gaps if "@%p2" in g.text]
    assert bool(guarded) == (max(sizes) < 8) and all(g.kind == "instruction" for g in guarded)


BOTH = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry both(.param .u64 out, .param .u32 n)
.reqntid 32, 1, 1
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<3>;
	.reg .pred %p<3>;
	ld.param.u64 %rd0, [out];
	ld.param.u32 %r0, [n];
	mov.u32 %r1, %tid.x;
	setp.lt.u32 %p0, %r1, 16;
	sub.u32 %r2, %r1, 8;
	setp.FIRST %p1, %r2, SECOND;
	JOINED
	mad.wide.u32 %rd1, %r1, 4, %rd0;
	@%p1 st.global.b32 [%rd1], %r1;
	ret;
}
"""


@pytest.mark.parametrize(("compare", "bound", "joined", "kinds"), [
    ("lt.u32", "%r0", "", set()),  # of lanes 8 to 31 0 to 23, of those before huge
    ("lt.u32", "24", "", {"bound"}),
    ("lt.u32", "%r0", "and.pred %p1, %p0, %p1;", {"bound"}),  # of lanes below 16: 0 to 7
    ("lt.and.u32", "%r0, %p0", "", {"bound"}),
    ("le.u32", "7", "", set()),
    ("ge.s32", "-8", "", {"false"}),
    ("gt.s32", "-8", "", set()),  # -8 itself and -7
])  # fmt: skip
def test_boundaries(compare: str, bound: str, joined: str, kinds: set[str]) -> None:
    """A comparison counts where what it is joined with holds; signed ones and `le` have their own
    last index below the bound. Of `p0`, which lanes 15 and 16 are beside, nothing is open."""
    text = BOTH.replace("FIRST", compare).replace("SECOND", bound).replace("JOINED", joined)
    launch = Launch(
        "both", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("out"), ScalarParam("n", "n"))
    )
    found = emulate(text, launch, {"out": np.zeros(32, np.uint32)}, {"n": 8})
    assert {g.kind for g in found.coverage["both"].gaps("both")} == kinds


def test_a_skeleton_has_no_numbers() -> None:
    assert skeleton("add.u32 %r12, %r3, 5;") == skeleton("add.u32 %r12, %r3, 0x40;")
    assert skeleton("add.u32 %r12, %r3, 5;") != skeleton("add.u32 %r12, %r4, 5;")
    assert skeleton("ld.v4.b32 %a;") != skeleton("ld.v2.b32 %a;")


def test_a_gemm_is_covered_by_a_few_problems() -> None:
    dev, _, s = CASES[0]
    found = cover(problem_for(s), s, dev)
    assert found.same and not found.error and not [g for g in found.gaps if g.kind == "instruction"]
    assert 1 < len(found.chosen) <= found.tried
