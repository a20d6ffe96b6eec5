"""gdn_prefill: a gated delta net over packed sequences, in chunks."""

import re
from typing import Any

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.gdn_prefill.decisions import by_wgmma, main_warps, registers
from tests.given import B200, BOTH, H200, Json, altering, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Reference, Refused, Row, Run, Same, Sampled, Size

_FREE = frozenset({"warp_sync"})
PREFILL = family("gdn_prefill")
NAME = "gdn_prefill_qk16_v32_d128_k_last"
strategy = strategies(
    PREFILL, kernels="one", products="mma_sync", chunk=16, rows=32, row_tiles=1, helpers=1,
    stages=2, operands="half", solve="once", solve_block=16, order="heads",
)  # fmt: skip


def definition(size: int = 64, queries: int = 1, values: int = 2, dtype: str = "bfloat16") -> Json:
    heads = {"num_q_heads": queries, "num_k_heads": queries, "num_v_heads": values}
    return resized(NAME, dtype, head_size=size, **heads)


def problem(
    tokens: int = 70,
    sequences: int = 3,
    size: int = 64,
    queries: int = 1,
    values: int = 2,
    dtype: str = "bfloat16",
) -> Problem:
    axes = {"total_seq_len": tokens, "num_seqs": sequences, "len_cu_seqlens": sequences + 1}
    return PREFILL.problem(definition(size, queries, values, dtype), axes)


#: one kernel for every path through the builder
PATHS = {
    "one block": strategy(),
    "one block, in pairs": strategy(operands="pairs", solve="pairs", stages=3, order="sequences"),
    "two tiles a warp": strategy(rows=64, row_tiles=2, stages=3),
    "blocks one after another": strategy(chunk=32, rows=16, helpers=2, solve="pairs"),
    "one block of two units": strategy(chunk=32, helpers=4, solve_block=32, stages=4),
    "blocks of two units, in pairs": strategy(
        chunk=64, rows=16, helpers=6, solve_block=32, operands="pairs", solve="pairs"
    ),
    "four blocks": strategy(chunk=64, rows=16, helpers=4, order="sequences"),
    "two kernels": strategy(kernels="two"),
    "two kernels, blocks in pairs": strategy(
        chunk=64,
        rows=16,
        helpers=4,
        solve_block=32,
        operands="pairs",
        solve="pairs",
        stages=3,
        kernels="two",
    ),
}
#: by tcgen05, of heads of so many dims
TCGEN05 = {
    "tcgen05, 64 rows": (64, strategy(rows=64, stages=3, operands="pairs", solve="pairs")),
    "tcgen05, two tiles a warp": (
        128,
        strategy(chunk=32, rows=128, row_tiles=2, helpers=2, kernels="two"),
    ),
    "tcgen05, halves of a quarter": (
        128,
        strategy(chunk=64, rows=128, helpers=4, operands="pairs", solve_block=32),
    ),
    "tcgen05, 64 rows of 256": (256, strategy(rows=64, kernels="two")),
}
#: by wgmma, likewise
WGMMA = {
    f"wgmma, {name}": (size, strategy(products="wgmma", **how))
    for name, size, how in (
        ("64 rows", 128, {"chunk": 64, "rows": 64, "helpers": 4, "stages": 3}),
        ("two tiles", 128, {"chunk": 32, "rows": 128, "row_tiles": 2, "helpers": 2}),
        ("two turns", 128, {"chunk": 64, "rows": 128, "helpers": 4, "kernels": "two"}),
        ("pairs", 64, {"rows": 64, "stages": 3, "operands": "pairs", "solve": "pairs"}),
        ("two units", 256, {"chunk": 32, "rows": 64, "solve_block": 32, "kernels": "two"}),
    )
}
_QUICK = (
    "sm_90a: one block",
    "sm_90a: one block, in pairs",
    "sm_90a: two tiles a warp",
    "sm_90a: two kernels",
    "sm_100a: tcgen05, 64 rows",
    "sm_90a: wgmma, 64 rows",
)
_AXES = {"total_seq_len": 9, "num_seqs": 2, "len_cu_seqlens": 3}
_bad = altering(definition(), _AXES)


def _in_place(node: Statement) -> bool:
    """Whether an instruction changes registers that it reads: they hold something before, too."""
    row = atom(node.arg.atom)
    written = [row.operand(node, a.operand) for a in row.accesses if a.mode != "r"]
    read = [row.operand(node, a.operand) for a in row.accesses if a.mode != "w"]
    return any(place in read for place in written)


def _choices(f: Fields, p: Problem, dev: Device) -> Any:
    """Choices of which there are many; what registers a block takes."""
    held = registers(f, p, dev) * 32 * (main_warps(f) + f.helpers) <= dev.registers_per_sm
    held |= by_wgmma(f)
    counts = [(f.chunk == n).sum() for n in (16, 32, 64)]
    counts += [(f.operands == name).sum() for name in ("half", "pairs")]
    return held.all() and min(counts) >= 150


def _refused(sentence: str, size: int = 64, **changes: int | str) -> Refused:
    return Refused(problem(size=size), strategy(**changes), sentence)


_LENGTHS = [(0, 0, 1), (16, 0, 32), (15, 17, 33), (1, 1, 1), (40,)]
_ORDER = strategy(order="sequences", stages=3)
ROW = Row(
    PREFILL,
    cases=(
        *(Case(n, d, s, problem(), problem(), (0,)) for d in BOTH for n, s in PATHS.items()),
        *(Case(n, B200, s, problem(size=size), problem(100, 2, size, 1, 1), (0,))
          for n, (size, s) in TCGEN05.items()),
        *(Case(n, H200, s, problem(size=size), problem(100, 2, size, 1, 1), (0,))
          for n, (size, s) in WGMMA.items()),
    ),
    quick={"machine": _QUICK, "emulator": (_QUICK[0], *_QUICK[-2:])},
    sizes=(
        Size(problem(6, 1, 128, 16, 32), 1000, holds=_choices),
        *(Size(problem(8192, n, 128, 16, 32), 1000, near=0.05, spread=0.5, holds=_choices)
          for n in (1, 32)),
        Size(problem(4096, 4, 128, 16, 32),
             holds=lambda f, p, dev: len(f.chunk) == (4588 if dev.has_tmem else 5262)),
        *(Size(problem(100, 2, size, 4, 8, dtype), 300, (H200,),
               holds=lambda f, p, dev: p["head_size"] % f.rows == 0)
          for size in (64, 128, 256) for dtype in ("float16", "bfloat16")),
        Size(problem(1, 1, 64, 1, 1)), Size(problem(99, 7, 256, 2, 16)),
        Size(problem(16384, 64, 128, 16, 32)),
    ),
    refused=(
        _refused("the rows of a CTA divide those of a state", rows=128),
        _refused("the rows of a warp divide those of a CTA", rows=16, row_tiles=2),
        _refused("what is solved at a time divides a chunk", solve_block=32),
        _refused("most helpers have blocks of tokens to relate", helpers=3),
        _refused("the shared memory", 128, chunk=64, rows=128, stages=4, operands="pairs"),
        _refused("exceed the registers of a thread", 128, chunk=64, rows=128, helpers=4),
        _refused("of four or eight main warps", products="wgmma"),
    ),
    bad=(
        Bad(definition(), {}, "axis total_seq_len is not given"),
        Bad(definition(), _AXES | {"num_seqs": 0}, "positive integer, not 0"),
        Bad(definition(), _AXES | {"head_size": 128}, "head_size is 64 by definition"),
        Bad(definition(), _AXES | {"num_seqs": 3}, "len_cu_seqlens must be num_seqs \\+ 1"),
        Bad(definition(), _AXES | {"total_seq_len": 2**26}, "values have 8589934592 elements"),
        Bad(definition(96), _AXES, "head_size = 96 must be one of \\(64, 128, 256\\)"),
        Bad(definition(queries=2, values=3), _AXES, "must divide the value heads"),
        Bad(definition(dtype="float32"), _AXES, "must share one dtype"),
        _bad("inputs.state.dtype", "bfloat16", "state must be float32"),
        _bad("inputs.cu_seqlens.dtype", "int32", "cu_seqlens must be int64"),
        _bad("inputs.a.dtype", "float16", "must share one dtype"),
        _bad("axes.num_k_heads.value", 2, "as many query as key heads"),
        _bad("inputs.v.shape", ["num_seqs"], "has the inputs"),
        _bad("outputs", {}, "has the outputs"),
    ),
    ordered=(
        # one is for ptxas alone, which moves no load over it
        Ordered("one block of two units", problem(), PATHS["one block of two units"], kept=12,
                free=_FREE, missed=1, others=lambda node: not _in_place(node), slow=True),
        Ordered("one block", problem(), strategy(), kept=3,
                free=_FREE, missed=1, others=lambda node: not _in_place(node)),
        Ordered("tcgen05", problem(), TCGEN05["tcgen05, 64 rows"][1], B200),
        Ordered("wgmma", problem(), WGMMA["wgmma, pairs"][1], slow=True),
    ),
    planted=(
        Planted(
            "prefill", problem(40, 2), strategy(),
            {
                "the usual scale": ("0f3E000000", "0f3E100000"),
                "decay in base 2": ("0fBFB8AA3B", "0fBF800000"),
                "factors of other tokens": ("%leave0_1_0", "%leave0_0_0"),
                "a column that is not eliminated": (
                    re.compile(r"(fma\S+ %column4, \S+) %column3,"), r"\1 %column0,"
                ),
                "half of what is multiplied": (
                    re.compile(r"\{(%t\d+_)2, (%t\d+_)3\}"), r"{\g<1>0, \g<2>1}"
                ),
            },
        ),
        Planted(
            "tcgen05", problem(40, 2), TCGEN05["tcgen05, 64 rows"][1],
            {
                "a state's first term twice": ("b32 [%ra], {%t2_0,", "b32 [%ra], {%t1_0,"),
                "an update's, too": ("b32 [%ra], {%t111_0,", "b32 [%ra], {%t110_0,"),
                "columns of each other": ("b32 {%t120_0, %t120_1,", "b32 {%t120_1, %t120_0,"),
                "keys of other chunks": (
                    re.compile(r"xor.b32 (\S+ \S+), \S+;"), r"xor.b32 \1, 0;"
                ),
            },
            device=B200,
        ),
        Planted("wgmma", problem(40, 2), WGMMA["wgmma, pairs"][1],
                {"an update's first term twice": ("{%t89_0,", "{%t88_0,")}),
    ),
    sampled=tuple(
        Sampled(f"{size} dims, {dtype}", problem(20, 2, size, q, v, dtype),
                H200 if size > 64 else B200, size, whole=True, where={"chunk": 16}, slow=True)
        for size, q, v, dtype in (
            (64, 2, 6, "float16"), (128, 1, 1, "bfloat16"), (256, 1, 1, "float16")
        )
    ),
    runs=(
        *(Run(f"{'with' if given else 'without'} a state, scale {scale}", problem(37, 3),
              strategy(), {"seed": 1, "given": given, "scale": scale}, slow=scale == 0)
          for given, scale in ((False, None), (False, 0.0), (True, -0.0), (True, 2.5))),
        Run("two kernels, each value head with a key head", problem(37, 3, queries=2),
            PATHS["two kernels"], slow=True),
        *(Run(f"lengths {n}", problem(sum(n), len(n)), _ORDER, {"lengths": n}, slow=i % 2 == 1)
          for i, n in enumerate(_LENGTHS)),
    ),
    references=tuple(
        Reference(n, definition(128, 1, 1), problem(100, 2, 128, 1, 1), PATHS[n], 0.6,
                  slow=True)
        for n in ("one block of two units", "one block, in pairs")
    ),
    same=(Same(_ORDER, (problem(1, 1), *(problem(sum(n), len(n)) for n in _LENGTHS))),),
)  # fmt: skip
