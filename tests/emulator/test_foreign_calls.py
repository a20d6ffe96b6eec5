"""Functions: what is called, by whom, with which lanes, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from ptxflow.compiler.launch import Launch, PointerParam

TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.visible .func (.param .b32 result) collatz(.param .b32 number);
.visible .entry test(.param .u64 out)
.reqntid 32, 1, 1
{
    .reg .b32 %r<4>;
    .reg .b64 %at;
    .reg .pred %p<2>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %at, [out];
    mad.wide.u32 %at, %r1, 4, %at;
    mov.u32 %r3, 1000;
    setp.ne.u32 %p1, %r1, 5;
    {
        .param .b32 param0;
        st.param.b32 [param0], %r1;
        .param .b32 retval0;
        st.param.b32 [retval0], %r3;
        @%p1 call.uni (retval0), collatz, (param0);
        ld.param.b32 %r2, [retval0];
    }
    st.global.u32 [%at], %r2;
    ret;
}
.func (.param .b32 half) halved(.param .b32 number)
{
    .reg .b32 %r<2>;
    ld.param.b32 %r1, [number];
    shr.u32 %r1, %r1, 1;
    st.param.b32 [half], %r1;
    ret;
}
.visible .func (.param .b32 result) collatz(
    .param .b32 number
)
{
    .reg .b32 %r<4>;
    .reg .pred %p<3>;
    ld.param.b32 %r1, [number];
    mov.u32 %r2, 0;
AGAIN:
    st.param.b32 [result], %r2;
    setp.le.u32 %p1, %r1, 1;
    @%p1 ret;
    add.u32 %r2, %r2, 1;
    and.b32 %r3, %r1, 1;
    setp.eq.u32 %p2, %r3, 1;
    @%p2 bra ODD;
    {
        .param .b32 a;
        .param .b32 b;
        st.param.b32 [a], %r1;
        call (b), halved, (a);
        ld.param.b32 %r1, [b];
    }
    bra AGAIN;
ODD:
    mad.lo.u32 %r1, %r1, 3, 1;
    bra AGAIN;
}
"""


def run(text: str) -> NDArray[np.uint32]:
    out = np.zeros(32, np.uint32)
    launch = Launch("test", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("out"),))
    emulate(text, launch, {"out": out}, {})
    return out


def steps(number: int) -> int:
    return 0 if number <= 1 else 1 + steps(3 * number + 1 if number % 2 else number // 2)


def test_a_function_that_calls_another() -> None:
    """Lanes return at different times; lane 5 does not call."""
    assert run(TEXT).tolist() == [1000 if lane == 5 else steps(lane) for lane in range(32)]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("collatz, (param0)", "unknown, (param0)", "no body of 'unknown'"),
        ("(retval0), collatz, (param0)", "collatz, (param0)", "takes 2 parameters, not 1"),
        ("call (b), halved", "call (b), collatz", "'collatz' calls itself"),
        (".param .b32 param0;", ".param .b64 param0;", "no .param .b32 to pass"),
        (".param .b32 param0;", ".param .b8 param0[4];", "not a scalar"),
        ("[param0], %r1", "[param0+2], %r1", "parts of a parameter"),
    ],
)
def test_what_is_refused(old: str, new: str, says: str) -> None:
    assert old in TEXT
    with pytest.raises(PtxSyntaxError, match="line") as error:
        run(TEXT.replace(old, new))
    assert says in str(error.value)
