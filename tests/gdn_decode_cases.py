"""gdn_decode problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

GDN = family("gdn_decode")
H200, B200 = device("h200"), device("b200")
_TOKEN = ["batch_size", "seq_len"]


def definition(
    size: int = 128, queries: int = 16, values: int = 32, dtype: str = "bfloat16"
) -> dict[str, Any]:
    def tensor(kind: str, *shape: str) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": kind}

    sizes = {"seq_len": 1, "num_q_heads": queries, "num_k_heads": queries, "num_v_heads": values,
             "head_size": size}  # fmt: skip
    state = tensor("float32", "batch_size", "num_v_heads", "head_size", "head_size")
    gate, value = (tensor(dtype, *_TOKEN, "num_v_heads", *last) for last in ((), ("head_size",)))
    number = tensor("float32", "num_v_heads")
    return {
        "name": f"gdn_decode_qk{queries}_v{values}_d{size}_k_last",
        "op_type": "gdn",
        "axes": {"batch_size": {"type": "var"}}
        | {name: {"type": "const", "value": n} for name, n in sizes.items()},
        "inputs": {
            "q": tensor(dtype, *_TOKEN, "num_q_heads", "head_size"),
            "k": tensor(dtype, *_TOKEN, "num_k_heads", "head_size"),
            "v": value,
            "state": state,
            "A_log": number,
            "a": gate,
            "dt_bias": number,
            "b": gate,
            "scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"output": value, "new_state": state},
    }


def problem(
    batch: int = 64,
    size: int = 128,
    queries: int = 16,
    values: int = 32,
    dtype: str = "bfloat16",
) -> Problem:
    return GDN.problem(definition(size, queries, values, dtype), {"batch_size": batch})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(GDN, p, dev)


_BASE: dict[str, int | str] = {
    "row_threads": 8, "vector": 4, "rows_in_flight": 2, "warps": 4, "head_ctas": 4,
    "ctas_per_sm": 0, "path": "registers", "stages": 1, "reduction": "together",
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("gdn_decode", tuple({**_BASE, **changes}.items()))


_LOADED: dict[str, int | str] = {"path": "bulk_load", "head_ctas": 1}
_BOTH: dict[str, int | str] = {"path": "bulk", "head_ctas": 1}
#: one kernel for every path through the builder
PATHS = {
    "one step": strategy(),
    "one row a lane, narrow vectors": strategy(
        rows_in_flight=1, vector=2, warps=8, reduction="apart"
    ),
    "several steps": strategy(row_threads=16, head_ctas=2, warps=2, rows_in_flight=4),
    "eight rows a lane": strategy(row_threads=32, head_ctas=1, rows_in_flight=8),
    "a CTA strides over parts of heads": strategy(ctas_per_sm=2, head_ctas=2, reduction="apart"),
    "loaded in bulk, once": strategy(path="bulk_load"),
    "loaded in bulk, through a ring": strategy(**_LOADED, stages=2),
    "loaded in bulk, the ring is filled once": strategy(**_LOADED, stages=4, rows_in_flight=2),
    "loaded in bulk, a CTA strides": strategy(
        **_LOADED, stages=3, ctas_per_sm=1, row_threads=32, rows_in_flight=4
    ),
    "both ways in bulk, once": strategy(path="bulk"),
    "both ways in bulk, one stage": strategy(**_BOTH, warps=2, rows_in_flight=1),
    "both ways in bulk, through a ring": strategy(**_BOTH, stages=3, reduction="apart"),
    "both ways in bulk, the ring is filled once": strategy(**_BOTH, stages=4),
    "both ways in bulk, a CTA strides": strategy(
        **_BOTH, stages=2, ctas_per_sm=1, row_threads=16, warps=2
    ),
}
CASES = [(dev, name, s) for dev in (H200, B200) for name, s in PATHS.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]
