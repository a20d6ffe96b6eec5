"""Kernels that Triton, TileLang and Helion compile offline, for sm_90a and sm_100a, in check-ptx.

    python -m tests.emulator.foreign.sweep LOG.jsonl --half looked --compiler triton
    python -m tests.emulator.foreign.sweep eval/results/foreign.jsonl.xz > eval/results/foreign.md

A kernel is in one of two halves by a hash of its name. What findings mean was decided on the looked
half: a finding is witnessed where its kind (KINDS) is to be seen in the text itself, by words alone
and without the emulator; all others are false alarms until somebody has looked. With --half the
kernels of a compiler that is installed are added to the log, without it the page is printed.
"""

# mypy: ignore-errors

import argparse
import hashlib
import itertools
import json
import lzma
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ptxflow.command import BadInput
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.verify.foreign import Finding, check
from tests.emulator.described import fixture_described
from tests.emulator.foreign.fixtures import HERE, made

SCHEDULES = 2
LIMIT = 2_000_000  # instructions of a schedule


def triton_cases(t: ModuleType) -> Iterator[object]:
    """Every kernel of the sweep that Triton compiles; `t` is make_triton."""

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
        return replace(case, name=case.name + text)

    turn = itertools.count()
    for arch in (90, 100):
        tiles = ((64, 64, 64), (128, 64, 64), (128, 128, 32), (64, 128, 64), (128, 32, 64),
                 (128, 256, 64))  # fmt: skip
        for (m, n, k), (a, b) in itertools.product(
            tiles, ((True, True), (True, False), (False, True))
        ):
            i = next(turn)
            mnk = (m + 8, n, 2 * k + 8 + k * (i % 3))
            case = t.gemm(arch, "tma", ("fp16", "bf16")[i % 2], (m, n, k), mnk,
                          (4, 8)[i // 2 % 2], 2 + i % 3, a, b)  # fmt: skip
            yield named(case, f"_{'mk'[not a]}{'nk'[not b]}_{i}")
        for tile, stages in itertools.product(
            ((64, 64, 64), (64, 128, 64), (64, 128, 32), (64, 256, 64)) if arch == 90
            else ((128, 64, 64), (128, 128, 64), (128, 128, 32), (128, 256, 64)), (2, 3, 4)
        ):  # fmt: skip
            m, n, k = tile
            mnk = (m, n + 8, 3 * k + 8)
            yield named(
                t.gemm(arch, "specialised", ("fp16", "bf16")[stages % 2], tile, mnk, 4, stages),
                f"_{stages}s",
            )
        for stages in (2, 3, 4) if arch == 100 else ():
            for n in (32, 64, 128):
                yield named(
                    t.gemm(arch, "persistent", "fp16", (128, n, 64), (264, n - 8, 136), 4, stages),
                    f"_{stages}s",
                )
        for tile, dtype in itertools.product(
            ((16, 32, 32), (16, 64, 64), (32, 32, 32), (64, 32, 32), (64, 64, 32), (64, 64, 64),
             (128, 32, 64), (128, 64, 64)), ("fp16", "bf16")
        ):  # fmt: skip
            m, n, k = tile
            yield t.gemm(
                arch, "pointers", dtype, tile, (m + 8, n, 2 * k + 16), 4, 3, b_rows_are_n=False
            )
        for tile, keys, dtype, warps in itertools.product(
            (64, 128), (32, 64), ("fp16", "bf16"), (4, 8)
        ):
            yield named(t.attention(arch, dtype, tile, keys, warps), f"_{warps}w")
        for dtype, block, warps in itertools.product(
            ("fp32", "fp16", "bf16"), (256, 512, 2048), (1, 4, 8)
        ):
            yield rows("softmax", arch, dtype, {"x": None}, warps, BLOCK=block)
        for m, warps in itertools.product((16, 32, 64), (1, 4, 8)):
            case = replace(t.reduction(arch), constants={"BM": m, "BN": 128}, grid=f"-(-M // {m})",
                             options={"num_warps": warps})  # fmt: skip
            yield named(case, f"_{m}_{warps}w")
        for dtype, block, warps in itertools.product(("fp32", "fp16", "bf16"), (128, 1024), (1, 4)):
            yield rows("vector_add", arch, dtype, {"x": None, "y": None}, warps, "sum", BLOCK=block)
            yield rows(
                "layer_norm",
                arch,
                dtype,
                {"x": None, "w": ["N"], "b": ["N"]},
                warps,
                BLOCK=min(block, 256),
            )
        for dtype, block in itertools.product(("fp32", "fp16", "bf16"), (128, 512)):
            yield rows("dropout", arch, dtype, {"x": None}, 4, SEED=7, P=0.5, BLOCK=block)
    for m, n in itertools.product((128, 256), (32, 64, 128)) if t.gluon_kernels else ():
        yield t.pair(m, n, 64)


def half(name: str) -> str:
    return ("looked", "held")[hashlib.sha256(name.encode()).digest()[0] % 2]


@dataclass(frozen=True)
class Kind:
    """What findings of a rule mean: which messages, what is so in the text, and by which sentence
    of the ISA that is wrong."""

    rule: str
    message: str
    why: str
    seen: Callable[[Sequence[str], Finding], bool]


def _none(word: str) -> Callable[[Sequence[str], Finding], bool]:
    return lambda lines, f: not any(word in x for x in lines)


def _none_between(word: str) -> Callable[[Sequence[str], Finding], bool]:
    """From the related line to the finding's; nowhere, where that comes first."""

    def seen(lines: Sequence[str], f: Finding) -> bool:
        first, last = min(f.related, default=0), f.line
        return not any(word in x for x in (lines[first : last - 1] if first < last else lines))

    return seen


def _none_on_the_way(word: str) -> Callable[[Sequence[str], Finding], bool]:
    """As `_none_between`; or, where warps take different ways, until who wrote hands on by
    barrier.sync, and since who accesses was handed it."""

    def seen(lines: Sequence[str], f: Finding) -> bool:
        if _none_between(word)(lines, f):
            return True
        after, before = lines[min(f.related) :], lines[: f.line - 1][::-1]
        ways = [
            itertools.takewhile(lambda x: "\tbarrier.sync" not in x, w) for w in (after, before)
        ]
        return not any(word in x for way in ways for x in way)

    return seen


def _none_since_sync(lines: Sequence[str], f: Finding) -> bool:
    """No fence from where the thread last synchronised."""
    for x in reversed(lines[: f.line - 1]):
        if "tcgen05.fence::after" in x:
            return False
        if re.search(r"bar\.sync|try_wait|barrier\.cluster\.wait", x):
            return True
    return False


def _whole_lanes(lines: Sequence[str], f: Finding) -> bool:
    """No fence at all, and one of both is of all lanes: a product, not a load or store."""
    both = [lines[n - 1] for n in (f.line, *f.related)]
    whole = any(re.search(r"tcgen05\.(mma|dealloc)", x) for x in both)
    return whole and _none("tcgen05.fence::before")(lines, f)


def _watches(lines: Sequence[str], f: Finding) -> bool:
    """Behind the wait one lane of a warp is elected, before anything else is told or met; warps
    that take turns come to the end."""
    after = lines[f.line :]
    told = next((x for x in after if re.search(r"elect\.sync|arrive|\tbar|_wait|\tret", x)), "")
    return "elect.sync" in told and 0 not in f.schedules


def _untold(lines: Sequence[str], f: Finding) -> bool:
    """No barrier between the last use of tensor memory and what gives it back."""
    end = next(n for n, x in enumerate(lines) if "tcgen05.dealloc" in x)
    last = max(n for n, x in enumerate(lines[:end]) if re.search(r"tcgen05\.(ld|mma)\.", x))
    return not any(re.search(r"\tbar(rier)?\.", x) for x in lines[last:end])


KINDS = (
    Kind("tcgen05-fence", "after_thread_sync since", "tcgen05 operations of several threads are "
         "ordered by tcgen05.fence::before_thread_sync, a barrier and ::after_thread_sync; the "
         "last is not there", _none_since_sync),
    Kind("tcgen05-fence", "of another warp accessed", "the same, the first is not there",
         _whole_lanes),
    Kind("mbarrier-lifetime", "not fenced after its init", "what mbarrier.init wrote becomes known "
         "to others by fence.mbarrier_init; the text has none", _none("fence.mbarrier_init")),
    Kind("mbarrier-lifetime", "again, with no inval", "the place of an mbarrier is used anew after "
         "mbarrier.inval; the text has none", _none("mbarrier.inval")),
    Kind("proxy-fence", "tcgen05.alloc", "a bulk copy overwrites what tcgen05.alloc wrote, with no "
         "fence.proxy.async between", _none_on_the_way("fence.proxy.async")),
    Kind("proxy-fence", "mbarrier.init", "a bulk copy overwrites an mbarrier, with no "
         "fence.proxy.async between", _none_between("fence.proxy.async")),
    Kind("proxy-fence", "cp.async.c", "an MMA reads what cp.async wrote through the generic proxy, "
         "with no fence.proxy.async between", _none_between("fence.proxy.async")),
    Kind("in-flight", "no wait::ld", "registers of a tcgen05.ld are used before tcgen05.wait::ld",
         _none_between("tcgen05.wait::ld")),
    Kind("mbarrier-count", "is neither 0 nor 1", "the parity of a wait is 0 or 1; it is -1 here",
         lambda lines, f: "0xFFFFFFFF" in f.message),
    Kind("proxy-fence", "which was read by", "a bulk copy overwrites what was read through the "
         "generic proxy, with no fence.proxy.async between", _none_on_the_way("fence.proxy.async")),
    Kind("deadlock", "parity", "warps beside the one that copies wait for the same parity; nothing "
         "that they do holds the phases up, and two phases on they wait for ever (seen where "
         "schedules starve them)", _watches),
    Kind("out-of-bounds", "are not allocated (allocations: none", "a warp gives tensor memory back "
         "that nobody has told that the others are done with it", _untold),
    Kind("in-flight", "still works on tensor memory", "the same, at a time when a product is in "
         "flight", _untold),
)  # fmt: skip


def checked(case: object, maker: ModuleType) -> dict:
    """A row of the log: what check-ptx says of a kernel, or why it does not compile."""
    row = {"name": case.name, "arch": case.arch, "half": half(case.name),
           "compiler": maker.COMPILER}  # fmt: skip
    try:
        ptx, side = maker.compile_case(case)
    except Exception as error:
        return row | {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[-160:]}"}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            verdict = check(ptx, fixture_described(Path(folder), made(ptx, side)), SCHEDULES, LIMIT)
        except BadInput as error:
            return row | {"unread": str(error)[:200]}
    lines, kinds, open_ = ptx.splitlines(), Counter(), []
    for f in verdict.findings:
        if f.rule.level == "note":
            continue
        kind = next((k for k in KINDS if k.rule == f.rule.id and k.message in f.message), None)
        if kind and kind.seen(lines, f):
            kinds[KINDS.index(kind)] += 1
        else:
            open_.append([f.rule.id, f.line, f.message[:300]])
    return row | {
        "lines": len(lines), "instructions": verdict.instructions, "stopped": verdict.stopped,
        "seconds": round(time.process_time() - began, 1), "unreached": len(verdict.unreached),
        "ended": any(f.message.startswith("CTA ") for f in verdict.findings),
        "kinds": kinds, "open": open_,
        "notes": len(verdict.findings) - verdict.errors,
    }  # fmt: skip


def page(rows: Sequence[dict]) -> str:
    """The log as a page of Markdown."""
    ran = [r for r in rows if "kinds" in r]
    groups = defaultdict(list)
    for r in rows:
        groups[r["compiler"], f"sm_{r['arch']}a", r["half"]].append(r)
    heads = (
        "compiler", "target", "half", "kernels", "not compiled", "no verdict",
        "ended at a finding", "values right", "values wrong",
        "lines never executed", "nothing found", "with findings", "findings", "not witnessed",
    )  # fmt: skip
    table = []
    for key, group in sorted(groups.items()):
        held = [r for r in group if "kinds" in r and not r["stopped"]]
        whole = [r for r in held if not r["ended"]]
        right = sum(all(rule != "value" for rule, *_ in r["open"]) for r in whole)
        found = [sum(r["kinds"].values()) + len(r["open"]) for r in held]
        refused = sum("refused" in r for r in group)
        table.append((
            *key, len(group), refused, len(group) - refused - len(held),
            len(held) - len(whole), right, len(whole) - right,
            sum(r["unreached"] for r in held), found.count(0), len(held) - found.count(0),
            sum(found), sum(len(r["open"]) for r in held),
        ))  # fmt: skip
    kinds = []
    for i, kind in enumerate(KINDS):
        of = [r["kinds"][str(i)] for r in ran if str(i) in r["kinds"]]
        kinds.append((kind.rule, kind.why, len(of), sum(of)))
    shown = [
        markdown(heads, table, 3),
        markdown(("rule", "what it is", "kernels", "findings"), kinds, 2),
    ]
    left = [f"- {r['name']} ({r['compiler']}), line {n}, {rule}: {said}"
            for r in ran for rule, n, said in r["open"]]  # fmt: skip
    left += [f"- {r['name']} ({r['compiler']}): {said}" for r in rows
             if (said := r.get("refused") or r.get("unread") or r.get("stopped"))]  # fmt: skip
    seconds = sorted(r["seconds"] for r in ran)
    return HEAD.format(
        count=len(ran), schedules=SCHEDULES,
        median=seconds[len(seconds) // 2], worst=seconds[-1], table=shown[0],
        kinds=shown[1], left="\n".join(left) or "Nothing.",
    )  # fmt: skip


HEAD = """\
# check-ptx on kernels of other compilers

Made by `python -m tests.emulator.foreign.sweep eval/results/foreign.jsonl.xz`: {count} kernels that
Triton, TileLang and Helion compile offline (matrix products by TMA, by pointers, persistent and
with specialised warps, attention, softmax, layer norm, reductions, dropout, sums; three dtypes,
many tiles, stages and warps), each under {schedules} schedules. Values are compared with NumPy,
where nothing that is found ends the run. The median kernel takes {median} s of a core, the longest
{worst}.

{table}

A finding is what the letter of the PTX ISA does not promise; what compiler and hardware promise
each other beyond it is not known here. The meaning of each kind was decided on the looked half. A
finding is *witnessed* where the words of the text alone show it.

{kinds}

## Not witnessed, not compiled, not read

{left}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--half", choices=("looked", "held"))
    parser.add_argument("--compiler", choices=("triton", "tilelang", "helion"), default="triton")
    args = parser.parse_args()
    read = lzma.open if args.log.suffix == ".xz" else open
    rows = [json.loads(x) for x in read(args.log, "rt")] if args.log.exists() else []
    if not args.half:
        print(page(rows), end="")
        return 0
    sys.path.insert(0, str(HERE))
    maker = import_module(f"make_{args.compiler}")
    done = {r["name"] for r in rows if r["compiler"] == maker.COMPILER}
    with args.log.open("a") as log:
        for case in triton_cases(maker) if args.compiler == "triton" else maker.cases():
            if case.name not in done and half(case.name) == args.half:
                row = checked(case, maker)
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(case.name, row.get("seconds"), row.get("open", row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
