"""Parameters that are passed by value, and pointers to tensors that are not given."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    Param,
    PointerParam,
    PresentParam,
    RandomParam,
)

PARAMS: tuple[Param, ...] = (
    PointerParam("out"),
    PointerParam("state"),
    PresentParam("state"),
    InputParam("scale", "float32"),
    RandomParam(1),
    RandomParam(2),
)
PTX = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 state, .param .u32 present, .param .u32 scale,
                  .param .u32 seed, .param .u32 offset)
.reqntid 32, 1, 1
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<5>;
    ld.param.u64 %rd0, [out];
    ld.param.u64 %rd1, [state];
    ld.param.u32 %r0, [present];
    ld.param.u32 %r1, [scale];
    ld.param.u32 %r2, [seed];
    ld.param.u32 %r3, [offset];
    st.global.b64 [%rd0], %rd1;
    st.global.v4.b32 [%rd0+16], {%r0, %r1, %r2, %r3};
    ret;
}
"""


@pytest.mark.parametrize("given", [True, False])
def test_parameters_by_value(given: bool) -> None:
    launch = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, PARAMS)
    out = np.full(8, 0xFFFFFFFF, np.uint32)
    tensors = {"out": out} | ({"state": np.zeros(4, np.float32)} if given else {})
    arguments = Arguments({"scale": 0.5}, seed=3 << 32, offset=9)
    emulate(PTX, launch, tensors, {}, arguments=arguments)
    assert out[4:].tolist() == [given, 0x3F000000, 3, 9]
    assert bool(out[:2].any()) == given


def test_a_tensor_that_is_not_optional_must_be_given() -> None:
    params = tuple(p for p in PARAMS if not isinstance(p, PresentParam))
    launch = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, params)
    text = PTX.replace(".param .u32 present, ", "").replace("ld.param.u32 %r0, [present];", "")
    with pytest.raises(KeyError):
        emulate(
            text, launch, {"out": np.zeros(8, np.uint32)}, {}, arguments=Arguments({"scale": 1})
        )
