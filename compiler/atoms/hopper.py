"""Atoms of sm_90a: wgmma with A in shared memory or in registers, its ordering, stmatrix."""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import Statement

_SASS = {"bf16": "wgmma bf16", "f16": "wgmma f16", "e4m3": "wgmma fp8"}
_ACCUMULATORS = (
    Rule("N is 8..256 in steps of 8", lambda u: u.arg.attr("n") in range(8, 257, 8)),
    Rule("a thread holds N/2 accumulators", lambda u: u.src[0].arg == u.arg.attr("n") // 2),
)


def _wgmma_text(use: Statement, text: dict[str, str]) -> str:
    """Of A in registers it need not be said whether it is transposed, of float8 neither."""
    n, dtype = use.arg.attr("n"), use.arg.attr("dtype")
    ways, k = [use.arg.attr(name) for name in ("transposed_a", "transposed")], 16
    a = f"{{{text['a']}}}" if ways[0] is None else text["a"]
    if dtype == "e4m3":
        ways, k = [], 32
    majors = "".join(f", {int(way)}" for way in ways if way is not None)
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} "
        f"{{{text['acc']}}}, {a}, {text['b']}, {text['accumulate']}, 1, 1{majors};"
    )


instruction(
    "wgmma(acc: frag rw async wgmma, a b: desc r async wgmma, accumulate: value, dtype: str, n: "
    "int, transposed: bool=False, transposed_a: bool=False) warpgroup sm_90a -> mma",
    _wgmma_text,
    "9.7.15.5 wgmma.mma_async; 32 bytes of K of both operands in shared memory, K-major; "
    "transposed, with rows along K",
    sass=lambda u: (_SASS[u.arg.attr("dtype")],),
    rules=(
        *_ACCUMULATORS,
        Rule("operands are f16, bf16 or e4m3", lambda u: u.arg.attr("dtype") in _SASS),
        Rule(
            "float8 is K-major",
            lambda u: (
                u.arg.attr("dtype") != "e4m3"
                or not (u.arg.attr("transposed") or u.arg.attr("transposed_a"))
            ),
        ),
    ),
)


instruction(
    "wgmma_registers(acc: frag rw async wgmma, a: frag*4 r async wgmma, b: desc r async wgmma, "
    "accumulate: value, dtype: str, n: int, transposed: bool=False) warpgroup sm_90a -> mma",
    _wgmma_text,
    "9.7.15.5 wgmma.mma_async; A in registers; B in shared memory, K-major or, transposed, "
    "with its rows along K",
    sass=lambda u: (_SASS[u.arg.attr("dtype")],),
    rules=_ACCUMULATORS,
)
instruction(
    "wgmma_fence() warpgroup sm_90a orders -> fence_registers",
    "wgmma.fence.sync.aligned;",
    "9.7.15.7.1 wgmma.fence",
)
instruction(
    "wgmma_commit(pipe: str='wgmma') warpgroup sm_90a orders -> commit",
    "wgmma.commit_group.sync.aligned;",
    "9.7.15.7.2 wgmma.commit_group",
)
instruction(
    "wgmma_wait(pending: int, pipe: str='wgmma') warpgroup sm_90a orders -> wait_group",
    "wgmma.wait_group.sync.aligned {pending};",
    "9.7.15.7.3 wgmma.wait_group",
)
instruction(
    "stmatrix_x4(dst: smem w, offset: value, src: frag*4 r, transposed: str='') warp",
    "add.u32 %ra, {dst_reg}, {offset};\n"
    "stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [%ra], {{{src}}};",
    "9.7.14.5.16 stmatrix, each matrix as it is held or transposed",
    sass=lambda u: ("stmatrix.trans" if u.arg.attr("transposed") else "stmatrix",),
)
