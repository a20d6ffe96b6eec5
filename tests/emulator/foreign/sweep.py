"""Kernels that Triton compiles here, offline, for sm_90a and sm_100a, through check-ptx.

    python -m tests.emulator.foreign.sweep --half looked --out LOG
    python -m tests.emulator.foreign.sweep --page LOG... > eval/results/foreign.md

A kernel is in one of two halves by a hash of its name: what findings mean was decided on the looked
half (KINDS), the held half was run once after that. A log goes on where it stopped.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ptxflow.command import BadInput
from ptxflow.eval.verify.foreign import check
from tests.emulator.described import fixture_described
from tests.emulator.foreign.fixtures import HERE, made

SCHEDULES = 2
LIMIT = 2_000_000  # instructions of a schedule


def cases() -> Iterator[object]:
    """Every kernel of the sweep; imports Triton."""
    sys.path.insert(0, str(HERE))
    import make_triton as t

    def rows(kernel, arch, dtype, inputs, warps, of=None, **constants):
        shape = ["R", "N"] if kernel in ("softmax", "layer_norm") else ["N"]
        out = "z" if kernel == "vector_add" else "y"
        tensors = {x: t.tensor(s or shape, dtype, "normal", i)
                   for i, (x, s) in enumerate(inputs.items())}  # fmt: skip
        return t.Case(
            f"{kernel}_{constants['BLOCK']}_{dtype}_{warps}w_sm{arch}", arch, kernel,
            {f"{x}_ptr": f"*{dtype}" for x in (*inputs, out)} | {"N": "N"}, constants,
            "R" if len(shape) == 2 else f"-(-N // {constants['BLOCK']})", {"R": 3, "N": 240},
            tensors | {out: t.tensor(shape, dtype, "nan")},
            {out: {"recipe": of or kernel, "of": list(inputs), "atol": 4e-3, "rtol": 2e-2}},
            {"num_warps": warps},
        )  # fmt: skip

    def named(case, text):
        return t.replace(case, name=case.name + text)

    turn = itertools.count()
    for arch in (90, 100):
        tiles = ((64, 64, 64), (128, 64, 64), (128, 128, 32), (64, 128, 64), (128, 32, 64),
                 (128, 256, 64))  # fmt: skip
        for (m, n, k), (a, b) in itertools.product(tiles, ((True, True), (True, False), (False, True))):
            i = next(turn)
            case = t.gemm(arch, "tma", ("fp16", "bf16")[i % 2], (m, n, k), (m + 8, n, 2 * k + 8 + k * (i % 3)),
                          (4, 8)[i // 2 % 2], 2 + i % 3, a, b)  # fmt: skip
            yield named(case, f"_{'mk'[not a]}{'nk'[not b]}_{i}")
        for tile, stages in itertools.product(
            ((64, 64, 64), (64, 128, 64), (64, 128, 32), (64, 256, 64)) if arch == 90
            else ((128, 64, 64), (128, 128, 64), (128, 128, 32), (128, 256, 64)), (2, 3, 4)
        ):  # fmt: skip
            m, n, k = tile
            mnk = (m, n + 8, 3 * k + 8)
            yield named(t.gemm(arch, "specialised", ("fp16", "bf16")[stages % 2], tile, mnk, 4, stages), f"_{stages}s")
        for stages in (2, 3, 4) if arch == 100 else ():
            for n in (32, 64, 128):
                yield named(t.gemm(arch, "persistent", "fp16", (128, n, 64), (264, n - 8, 136), 4, stages), f"_{stages}s")
        for tile, dtype in itertools.product(
            ((16, 32, 32), (16, 64, 64), (32, 32, 32), (64, 32, 32), (64, 64, 32), (64, 64, 64),
             (128, 32, 64), (128, 64, 64)), ("fp16", "bf16")
        ):  # fmt: skip
            m, n, k = tile
            yield t.gemm(arch, "pointers", dtype, tile, (m + 8, n, 2 * k + 16), 4, 3, b_rows_are_n=False)
        for tile, keys, dtype, warps in itertools.product((64, 128), (32, 64), ("fp16", "bf16"), (4, 8)):
            yield named(t.attention(arch, dtype, tile, keys, warps), f"_{warps}w")
        for dtype, block, warps in itertools.product(("fp32", "fp16", "bf16"), (256, 512, 2048), (1, 4, 8)):
            yield rows("softmax", arch, dtype, {"x": None}, warps, BLOCK=block)
        for m, warps in itertools.product((16, 32, 64), (1, 4, 8)):
            case = t.replace(t.reduction(arch), constants={"BM": m, "BN": 128}, grid=f"-(-M // {m})",
                             options={"num_warps": warps})  # fmt: skip
            yield named(case, f"_{m}_{warps}w")
        for dtype, block, warps in itertools.product(("fp32", "fp16", "bf16"), (128, 1024), (1, 4)):
            yield rows("vector_add", arch, dtype, {"x": None, "y": None}, warps, "sum", BLOCK=block)
            yield rows("layer_norm", arch, dtype, {"x": None, "w": ["N"], "b": ["N"]}, warps, BLOCK=min(block, 256))
        for dtype, block in itertools.product(("fp32", "fp16", "bf16"), (128, 512)):
            yield rows("dropout", arch, dtype, {"x": None}, 4, SEED=7, P=0.5, BLOCK=block)
    for m, n in itertools.product((128, 256), (32, 64, 128)) if t.gluon_kernels else ():
        yield t.pair(m, n, 64)


def half(name: str) -> str:
    return ("looked", "held")[hashlib.sha256(name.encode()).digest()[0] % 2]


def checked(case: object) -> dict:
    """A row of the log: what check-ptx says of a kernel, or why it does not compile."""
    import make_triton as t

    row = {"name": case.name, "arch": case.arch, "half": half(case.name)}
    try:
        ptx, side = t.compile_case(case)
    except Exception as error:
        return row | {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    lines, began = ptx.splitlines(), time.process_time()

    def opcode(line):
        found = re.search(r"(?:@!?\S+\s+)?([a-z][\w.:]+)", lines[line - 1]) if line else None
        return found[1] if found else ""

    with tempfile.TemporaryDirectory() as folder:
        try:
            verdict = check(ptx, fixture_described(Path(folder), made(ptx, side)), SCHEDULES, LIMIT)
        except BadInput as error:
            return row | {"compiler": side["compiler"], "unread": str(error)[:200]}
    return row | {
        "compiler": side["compiler"], "lines": len(lines), "instructions": verdict.instructions,
        "seconds": round(time.process_time() - began, 1), "stopped": verdict.stopped,
        "unreached": len(verdict.unreached),
        "findings": [
            {"rule": f.rule.id, "level": f.rule.level, "line": f.line, "at": opcode(f.line),
             "with": sorted({opcode(n) for n in f.related}), "message": f.message[:400]}
            for f in verdict.findings
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("looked", "held"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    done = {json.loads(x)["name"] for x in args.out.read_text().splitlines()} if args.out.exists() else set()
    asked = [c for c in cases() if c.name not in done and args.half in (None, half(c.name))]
    with args.out.open("a") as log:
        for case in asked:
            row = checked(case)
            log.write(json.dumps(row) + "\n")
            log.flush()
            told = row.get("refused") or row.get("unread") or row["stopped"] or dict(Counter(f["rule"] for f in row["findings"]))
            print(case.name, row.get("seconds"), told, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
