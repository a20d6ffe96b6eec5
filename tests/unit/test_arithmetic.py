"""Values of abstract runs: the unsigned 32-bit arithmetic of the IR and of PTX."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxflow.compiler.check.program import Program
from ptxflow.compiler.ir import CTAID, LANE, WARP, KernelInfo, Op, Value, alu, const, kernel, param

INFO = KernelInfo("k", "sm_90a", 4, 1, (), ())
WORD = st.one_of(st.integers(0, 40), st.integers(2**32 - 40, 2**32 - 1), st.integers(0, 2**32 - 1))
BITS = np.uint32(32)
NUMPY: dict[str, Callable[[np.uint32, np.uint32], np.uint32]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mulhi": lambda a, b: np.uint32(np.uint64(a) * np.uint64(b) >> np.uint64(32)),
    "div": lambda a, b: a // b if b else a,
    "rem": lambda a, b: a % b if b else a,
    "xor": np.bitwise_xor,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "shl": lambda a, b: a << b if b < BITS else np.uint32(0),
    "shr": lambda a, b: a >> b if b < BITS else np.uint32(0),
    "min": np.minimum,
    "lt": lambda a, b: np.uint32(a < b),
    "ge": lambda a, b: np.uint32(a >= b),
    "eq": lambda a, b: np.uint32(a == b),
    "ne": lambda a, b: np.uint32(a != b),
}
LEAVES = st.one_of(WORD.map(const), st.sampled_from([const(1, "n"), param("p"), CTAID, WARP, LANE]))
VALUES = st.recursive(
    LEAVES,
    lambda below: st.builds(alu, st.sampled_from(sorted({*NUMPY} - {"div", "rem"})), below, below)
    | st.builds(lambda name, a, b: alu(name, a, alu("or", b, 1)), st.sampled_from(["div", "rem"]),
                below, below),
    max_leaves=12,
)  # fmt: skip


def expected(node: Value, env: dict[str, int]) -> np.uint32:
    match node.op:
        case Op.CONST:
            number, name = node.arg
            return np.uint32(env[name] if name else number)
        case Op.PARAM:
            return np.uint32(env[node.arg])
        case Op.VAR:
            return np.uint32(env[node.arg[0]])
    a, b = (expected(s, env) for s in node.src)
    with np.errstate(over="ignore"):
        return NUMPY[node.arg](a, b)


@settings(max_examples=400)
@given(VALUES, WORD, WORD, WORD, st.integers(0, 3), st.integers(0, 31))
def test_a_value_is_that_of_32_bits(node: Value, n: int, p: int, ctaid: int, warp: int, lane: int):
    env = {"n": n, "p": p, "ctaid": ctaid, "warp": warp, "lane": lane}
    assert Program(kernel(INFO)).value(node)(env) == expected(node, env)


@pytest.mark.parametrize(
    ("node", "result"),
    [
        ((param("n") + -1) % 3, 1),
        ((param("n") - 1) // 2, 2),
        ((param("n") * -1) >> 31, 1),
        ((param("n") << 31) >> 31, 1),
        ((param("n") << (param("n") + 27)) % 7, 0),
        ((param("n") << (param("n") - 6)).min(7), 0),
        ((param("n") + -6) < param("n"), 0),
        ((param("n") - 6) & 7, 7),
        ((param("n") - 6) | 1, 2**32 - 1),
    ],
)
def test_what_needs_all_bits_sees_them_wrapped(node: Value, result: int) -> None:
    assert Program(kernel(INFO)).value(node)({"n": 5}) == result
