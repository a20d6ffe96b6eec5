"""gdn_prefill problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

PREFILL = family("gdn_prefill")
H200, B200 = device("h200"), device("b200")


def definition(
    size: int = 64, queries: int = 1, values: int = 2, dtype: str = "bfloat16"
) -> dict[str, Any]:
    def tensor(kind: str, *shape: str) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": kind}

    sizes = {"num_q_heads": queries, "num_k_heads": queries, "num_v_heads": values,
             "head_size": size}  # fmt: skip
    state = tensor("float32", "num_seqs", "num_v_heads", "head_size", "head_size")
    gate, value = (
        tensor(dtype, "total_seq_len", "num_v_heads", *last) for last in ((), ("head_size",))
    )
    number = tensor("float32", "num_v_heads")
    return {
        "name": f"gdn_prefill_qk{queries}_v{values}_d{size}_k_last",
        "op_type": "gdn",
        "axes": {axis: {"type": "var"} for axis in ("total_seq_len", "num_seqs", "len_cu_seqlens")}
        | {name: {"type": "const", "value": n} for name, n in sizes.items()},
        "inputs": {
            "q": tensor(dtype, "total_seq_len", "num_q_heads", "head_size"),
            "k": tensor(dtype, "total_seq_len", "num_k_heads", "head_size"),
            "v": value,
            "state": state,
            "A_log": number,
            "a": gate,
            "dt_bias": number,
            "b": gate,
            "cu_seqlens": tensor("int64", "len_cu_seqlens"),
            "scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"output": value, "new_state": state},
    }


def problem(
    tokens: int = 70,
    sequences: int = 3,
    size: int = 64,
    queries: int = 1,
    values: int = 2,
    dtype: str = "bfloat16",
) -> Problem:
    axes = {
        "total_seq_len": tokens,
        "num_seqs": sequences,
        "len_cu_seqlens": sequences + 1,
    }
    return PREFILL.problem(definition(size, queries, values, dtype), axes)


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(PREFILL, p, dev)


_BASE: dict[str, int | str] = {
    "chunk": 16, "rows": 32, "row_tiles": 1, "helpers": 1, "stages": 2, "operands": "half",
    "solve": "once", "solve_block": 16, "order": "heads",
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("gdn_prefill", tuple({**_BASE, **changes}.items()))


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
}
CASES = [(dev, name, s) for dev in (H200, B200) for name, s in PATHS.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]
