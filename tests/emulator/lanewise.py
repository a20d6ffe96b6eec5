"""One instruction on vectors of any length: a kernel that loads, computes and stores by thread."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.launch import Launch, PointerParam

Words = NDArray[Any]
TEXT = """
.version 8.8
.target {target}
.address_size 64
.visible .entry test({params})
.reqntid {threads}, 1, 1
{{
    .reg .b32 %t;
    .reg .pred %p, %q;
    .reg .b64 %at;
    {registers}
    mov.u32 %t, %tid.x;
    {loads}
    {body}
    {store}
    ret;
}}
"""


def text(body: str, widths: tuple[int, ...], out: int, threads: int, target: str) -> str:
    """`body` reads %a, %b, %c of those bits and writes %d of `out` bits."""
    registers = [f".reg .b{bits} %{name};" for name, bits in zip("abc", widths, strict=False)]
    place = "ld.param.u64 %at, [{0}]; mad.wide.u32 %at, %t, {1}, %at; "
    loads = [
        place.format(name, bits // 8) + f"ld.global.b{bits} %{name}, [%at];"
        for name, bits in zip("abc", widths, strict=False)
    ]
    params = ["out", *"abc"[: len(widths)]]
    return TEXT.format(
        target=target, threads=threads, body=body, loads="\n    ".join(loads),
        params=", ".join(f".param .u64 {name}" for name in params),
        registers=" ".join([*registers, f".reg .b{out} %d;"]),
        store=place.format("out", out // 8) + f"st.global.b{out} [%at], %d;",
    )  # fmt: skip


def lanewise(body: str, *inputs: Words, out: int = 32, target: str = "sm_90a") -> Words:
    """%d of each thread, as unsigned words of `out` bits; inputs are unsigned words."""
    count = len(inputs[0])
    threads = -(-count // 32) * 32
    tensors = {
        name: np.ascontiguousarray(np.resize(words, threads))
        for name, words in zip("abc", inputs, strict=False)
    }
    tensors["out"] = np.zeros(threads, f"u{out // 8}")
    widths = tuple(words.dtype.itemsize * 8 for words in inputs)
    params = tuple(PointerParam(name) for name in ("out", *"abc"[: len(inputs)]))
    launch = Launch("test", ("1", "1", "1"), threads, (1, 1, 1), 0, params)
    emulate(text(body, widths, out, threads, target), launch, tensors, {})
    return tensors["out"][:count]
