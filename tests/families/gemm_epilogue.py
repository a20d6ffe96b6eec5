"""GEMM with an epilogue: what it reads, by every path of GEMM's builders to the store."""

from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.definition import load
from tests.families import gemm
from tests.given import B200, H200, Json, altering
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Size

EPILOGUE = family("gemm_epilogue")
_NAMES = {
    ("bias",): "gemm_bias_n6144_k4096",
    ("up",): "gemm_silu_gate_n14336_k4096",
    ("residual",): "gemm_residual_n4096_k14336",
    ("bias", "residual"): "gemm_bias_residual_n4096_k4096",
}


def definition(*inputs: str, n: int = 0, k: int = 0) -> Json:
    given = load(_NAMES[inputs])
    return given.resized(**{axis: v for axis, v in (("N", n), ("K", k)) if v}).to_json()


def problem(*inputs: str, m: int = 4096, n: int = 4096, k: int = 4096) -> Problem:
    return EPILOGUE.problem(definition(*inputs, n=n, k=k), {"M": m})


def like(s: Strategy, **changes: int | str) -> Strategy:
    """GEMM's strategy, of this family."""
    return Strategy("gemm_epilogue", s.replace(**changes).choices)


_GATE = definition("up")
_CASES = (
    (H200, "staged, bias and residual", gemm.strategy(tile_n=64), ("bias", "residual"), 4096),
    (H200, "direct, gate", gemm.strategy(epilogue="direct", tile_n=80), ("up",), 4096),
    (H200, "swapped, bias and residual", gemm.swapped(tile_n=16, consumers=1),
     ("bias", "residual"), 16),
    (H200, "K over two CTAs, residual", gemm.split(split_k=2, tile_m=64, consumers=1),
     ("residual",), 64),
    (B200, "staged by blocks, gate", gemm.strategy(tile_n=192, epilogue="tma_blocks"), ("up",),
     4096),
    (B200, "M 64, bias and residual", gemm.strategy(tile_m=64, epilogue="direct"),
     ("bias", "residual"), 4096),
    (B200, "M 64, staged, bias", gemm.strategy(tile_m=64), ("bias",), 4096),
    (B200, "swapped, bias and residual", gemm.swapped(tile_n=16, consumers=1),
     ("bias", "residual"), 16),
    (B200, "K over two CTAs, gate", gemm.split(split_k=2, tile_m=64, consumers=1), ("up",), 64),
)  # fmt: skip
_QUICK = ("sm_90a: swapped, bias and residual", "sm_100a: M 64, bias and residual")
_bad = altering(_GATE, {"M": 1})


ROW = Row(
    EPILOGUE,
    cases=tuple(
        Case(name, d, like(s), problem(*inputs, m=m), problem(*inputs, m=m))
        for d, name, s, inputs, m in _CASES
    ),
    quick={"machine": _QUICK, "emulator": _QUICK},
    sizes=(
        Size(problem("up"), 1000, near=0.5, spread=0.5),
        Size(problem("bias", "residual", m=1), near=0.01),
    ),
    refused=(
        Refused(problem("up"), like(gemm.strategy(tile_n=16)), "narrow tiles"),
        Refused(
            problem("bias", "residual"),
            like(gemm.strategy(), tile_m=256, tile_n=192, consumers=2),
            "what the epilogue reads exceed",
        ),
    ),
    bad=(
        Bad(_GATE, {}, "axis M is not given"),
        Bad(_GATE, {"M": 2**20}, "at most 4294967295 are counted"),
        _bad("inputs.up.shape", ["N", "M"], "a gemm has the inputs"),
        _bad("inputs.up.dtype", "float32", "must share one dtype"),
        _bad("inputs.scale", {"shape": None, "dtype": "float32"}, "a gemm has the inputs"),
        Bad(gemm.definition() | {"name": "plain"}, {"M": 1}, "one of the inputs bias, up"),
    ),
    ordered=(
        Ordered(
            "sm_90a: staged",
            problem("up"),
            like(gemm.strategy(tile_n=64)),
            free=frozenset({"warp_sync"}),
            least=8,
            slow=True,
        ),
    ),
    planted=(
        Planted(
            "another base of the gate's exponential",
            problem("up", m=100),
            like(gemm.split(tile_m=64, consumers=1)),
            {"log2 e": ("0fBFB8AA3B", "0fBFB80000")},
            trial=True,
            slow=True,
        ),
    ),
)
