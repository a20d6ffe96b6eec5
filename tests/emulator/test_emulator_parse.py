"""What the parser reads of a text, and the arguments that it is given."""

import numpy as np
import pytest

from ptxflow.compiler.emulator import PtxSyntaxError, emulate
from ptxflow.compiler.emulator.literals import number
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import Address, Immediate, Register, Vector, parse
from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    Param,
    PointerParam,
    PresentParam,
    RandomParam,
)

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
	.param .align 64 .b8 map[128],
	.param .u32 M
)
.reqntid 64, 1, 1
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<2>;
	.reg .pred %p<2>;
"""


def test_module() -> None:
    module = parse(HEAD + "AGAIN:\n\tmov.u32 %r1, 0x10; // note\n\t@!%p1 bra AGAIN;\n\tret;\n}\n")
    assert (module.target, module.entry) == ("sm_90a", "k")
    assert [(p.name, p.bytes, p.align) for p in module.parameters] == [
        ("map", 128, 64),
        ("M", 4, 4),
    ]
    assert module.directives["reqntid"] == (64, 1, 1)
    move, branch, _ = module.code
    assert move.operands[1] == Immediate(16) and move.line == 15
    assert branch.targets == (0,) and branch.guard is not None and branch.guard.negated


def test_operands() -> None:
    line = "\tcp.async [%r1+16], [%rd1, {%r2, %r3}], [smem];\n"
    first, second, third = parse(HEAD + line + "}\n").code[0].operands
    assert isinstance(first, Address) and first.offset == 16
    assert isinstance(second, Address) and isinstance(second.coordinates, Vector)
    assert [r.name for r in second.coordinates.items if isinstance(r, Register)] == ["%r2", "%r3"]
    assert isinstance(third, Address)


def test_numbers() -> None:
    assert [number(t) for t in ("10", "0xFF", "-3", "017", "0f3F800000", "%r1")] == [
        10,
        255,
        -3,
        15,
        0x3F800000,
        None,
    ]


def test_inner_scope_shadows() -> None:
    body = "{\n\t.reg .b64 %r1;\n\tmov.b64 %r1, 1;\n}\n\tmov.u32 %r1, 2;\n}\n"
    inner, outer = (i.operands[0] for i in parse(HEAD + body).code)
    assert isinstance(inner, Register) and isinstance(outer, Register)
    assert (inner.width, outer.width) == (64, 32) and inner.slot != outer.slot


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frobnicate.u32 %r1, %r2;", "line 14: unknown instruction `frobnicate.u32"),
        ("add.u32.sat %r1, %r2, 1;", "line 14: unknown instruction"),
        ("add.u32 %r1, %r9, 1;", "line 14: unknown operand '%r9'"),
        ("add.u32 %r1, %rd1, 1;", "%rd1 has 64 bits, not 32"),
        ("mov.u32 %r1, %clock;", "unknown special register"),
        ("bra NOWHERE;", "no label 'NOWHERE'"),
        ("mbarrier.try_wait.parity.shared::cluster.b64 %p1, [%r1], 0;", "unknown instruction"),
    ],
)
def test_errors_name_the_line(line: str, says: str) -> None:
    with pytest.raises(PtxSyntaxError) as error:
        Program(parse(f"{HEAD}\t{line}\n}}\n"))
    assert says in str(error.value)


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
