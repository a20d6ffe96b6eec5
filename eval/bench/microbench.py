"""Latency and throughput of instructions, timed on this machine's GPU: `ptxflow microbench`.

Of each probe (bench/probes.py) two kernels that differ in how many groups of steps they have are
launched in turns; the difference of their cycles by the number of groups is what a group costs.
Cycles are of the SM's clock, medians over SMs and passes; beside them the 5th and 95th percentile
over SMs, and the least and greatest median of a repeat. Kernels run in a child process: one that
faults or hangs costs its own row.
"""

import ctypes
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxflow.command import BadInput, Parser, one_line, reports
from ptxflow.compiler.atoms import all_atoms
from ptxflow.compiler.backend import ptxas, runtime, sass
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.launch import Launch, Param, PointerParam, ScalarParam, TensorMapParam
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.bench import probes
from ptxflow.eval.bench.probes import ARCH, CHAINS, PASSES, Probe

Array = npt.NDArray[Any]
REPEATS = 7
PATIENCE = 20.0  # seconds for one probe
FLUSH = 256 << 20  # bytes that are set to empty L2
INSTRUCTION = 16  # bytes of machine code
REMOVED = "ptxas leaves no instruction of it"
MOST_ISSUED = 4.2  # instructions a cycle: four schedulers, and what a clock may be off
MOST_APART = 0.05  # of latencies on two GPUs of one kind


@dataclass(frozen=True)
class Built:
    """A pair of kernels that differ in the number of their groups."""

    chains: int
    groups: int  # by how many
    cubins: tuple[bytes, bytes]

    @property
    def instructions(self) -> float:
        """Of machine code, for a step."""
        fewer, more = (len(sass.code(c)) // INSTRUCTION for c in self.cubins)
        return round((more - fewer) / self.groups / self.chains, 1)


def build(wanted: Sequence[Probe], workers: int) -> tuple[dict[str, list[Built]], dict[str, str]]:
    """The kernels of each probe, and why some have none."""
    jobs = [
        (p, count, chains)
        for p in wanted
        for chains, groups in sides(p)
        for count in (groups, 2 * groups)
    ]
    with ThreadPoolExecutor(workers) as pool:
        done = iter([*pool.map(_assembled, jobs)])
    found, refused = dict[str, list[Built]](), dict[str, str]()
    for (probe, groups, chains), fewer, more in zip(jobs[::2], done, done, strict=True):
        if isinstance(fewer, ptxas.Assembly) and isinstance(more, ptxas.Assembly):
            pair = Built(chains, groups, (fewer.cubin, more.cubin))
            found.setdefault(probe.name, []).append(pair)
        else:
            refused[probe.name] = f"no kernel: {fewer if isinstance(fewer, str) else more}"
    return {n: pairs for n, pairs in found.items() if n not in refused}, refused


def _assembled(job: tuple[Probe, int, int]) -> ptxas.Assembly | str:
    """A probe's kernel, or why there is none: a row that changed may leave its probe behind."""
    try:
        return ptxas.assemble(probes.kernel(*job), ARCH)
    except Exception as error:
        return _why(error)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def sides(probe: Probe) -> Iterator[tuple[int, int]]:
    """(steps of a group, groups) of the kernels of a probe."""
    if probe.latency:
        yield 1, probe.groups
    if probe.warps:
        yield CHAINS, max(probe.groups // 2, 2)


# On the GPU -------------------------------------------------------------------------------------


class Bench:
    """The GPU's memory that probes work on, and launches."""

    def __init__(self) -> None:
        self.driver = runtime.Driver()
        self.driver.use_context()
        self.info = runtime.gpu_info(driver=self.driver)
        places = probes.CHASE + self.info.sms * probes.HOPS * probes.LINE_WORDS
        words = np.arange(places + probes.LINE_WORDS, dtype=np.uint32) + probes.LINE_WORDS
        words[: probes.CHASE] = 0
        self.out_bytes = self.info.sms * 32 * PASSES * 16
        self.out, self.data = self._allocate(self.out_bytes), self._allocate(words.nbytes)
        self.flush = self._allocate(FLUSH)
        self.driver("cuMemcpyHtoD_v2", self.data, words.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_size_t(words.nbytes))  # fmt: skip

    def _allocate(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def spans(self, probe: Probe, pair: Built, warps: int) -> Array:
        """Cycles from the first start to the last end in a CTA, [2, repeats, CTAs, passes]."""
        ctas = self.info.sms // probe.cluster * probe.cluster
        params: list[Param] = [
            PointerParam("out"), PointerParam("data"), ScalarParam("zero", "0")
        ]  # fmt: skip
        if probe.map:
            strides = 2 * np.cumprod(probe.map[:-1])
            params.append(TensorMapParam("data", "bfloat16", tuple(map(str, probe.map)),
                                         tuple(map(str, strides)), probe.map, 128))  # fmt: skip
        launch = Launch(
            probes.ENTRY, (str(ctas), "1", "1"), 32 * warps, (probe.cluster, 1, 1), probes.SMEM,
            tuple(params),
        )  # fmt: skip
        kernels = [runtime.LoadedKernel(launch, cubin, self.driver) for cubin in pair.cubins]
        places = {"out": self.out.value, "data": self.data.value}
        calls = [kernel.bind(places, {}) for kernel in kernels]
        found = np.empty((2, REPEATS, ctas, PASSES))
        for repeat in range(REPEATS):
            for side, call in enumerate(calls):
                if probe.cold:
                    self.driver("cuMemsetD8_v2", self.flush, ctypes.c_ubyte(repeat),
                                ctypes.c_size_t(FLUSH))  # fmt: skip
                call()
                self.driver.synchronize()
                found[side, repeat] = span(self._read(ctas, warps))
        for kernel in kernels:
            kernel.unload()
        return found

    def _read(self, ctas: int, warps: int) -> Array:
        clocks = np.empty((ctas, warps, PASSES, 2), np.int64)
        self.driver("cuMemcpyDtoH_v2", clocks.ctypes.data_as(ctypes.c_void_p), self.out,
                    ctypes.c_size_t(clocks.nbytes))  # fmt: skip
        return clocks


def span(clocks: Array) -> Array:
    """From the first start to the last end, [CTAs, passes], of clocks [CTAs, warps, passes, 2]."""
    return clocks[..., 1].max(1) - clocks[..., 0].min(1)


def cost(spans: Array, groups: int) -> list[float]:
    """Cycles of a group: the median, the 5th and 95th percentile over SMs, and the least and
    greatest over repeats. Of spans [2, repeats, SMs, passes]; the first pass is left out."""
    each = (spans[1] - spans[0])[..., 1:] / groups
    over = np.percentile(np.median(each, (0, 2)), [5, 95])
    by_repeat = np.median(each, (1, 2))
    found = np.median(each), *over, by_repeat.min(), by_repeat.max()
    return [float(f"{x:.4g}") for x in found]


def timed(bench: Bench, probe: Probe, pairs: Sequence[Built]) -> dict[str, Any]:
    """A probe's row: cycles of a step that waits for the one before, and steps a cycle of an SM."""
    row: dict[str, Any] = {"rows": [*probe.rows], "sass": min(p.instructions for p in pairs)}
    if not row["sass"]:
        return {"rows": [*probe.rows], "refused": REMOVED}
    for pair in pairs:
        if pair.chains == 1:
            row["latency"] = cost(bench.spans(probe, pair, probe.least), pair.groups)
            continue
        for warps in probe.warps:
            cycles, low, high, *_ = cost(bench.spans(probe, pair, warps), pair.groups)
            uses = warps // probe.least * pair.chains
            rate = [uses / max(c, 1e-3) for c in (cycles, high, low)]
            if rate[0] * pair.instructions > MOST_ISSUED:  # what the kernels share did not cancel
                continue
            row.setdefault("throughput", {})[str(warps)] = [float(f"{x:.4g}") for x in rate]
    return row


# Children ---------------------------------------------------------------------------------------


def child(pipe: Connection, wanted: Sequence[Probe], built: Mapping[str, list[Built]]) -> None:
    """Tells what GPU it is, then of each probe its row or why there is none, as JSON."""

    def say(message: Mapping[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        bench = Bench()
    except (runtime.RuntimeUnavailable, runtime.LaunchError) as error:
        return say({"unavailable": str(error)})
    say({"gpu": bench.info.to_json()})
    for probe in wanted:
        try:
            say({"row": timed(bench, probe, built[probe.name])})
        except Exception as error:  # which may have spoiled the context: the next child goes on
            return say({"refused": _why(error)})


def measure(built: Mapping[str, list[Built]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(the GPU, rows so far) behind each probe: a child begins anew behind one that ended the last.
    BadInput where there is no GPU."""
    known, rows, gpu = probes.probes(), dict[str, Any](), dict[str, Any]()
    left = [known[name] for name in built]
    context = multiprocessing.get_context("fork")
    while left:
        mine, theirs = context.Pipe()
        process = context.Process(target=child, args=(theirs, left, built))
        process.start()
        theirs.close()
        while left:
            message = _hear(mine)
            if "gpu" in message:
                gpu = message["gpu"]
                continue
            if "unavailable" in message and not gpu:
                raise BadInput(message["unavailable"])
            name = left.pop(0).name
            refused = {"refused": message.get("refused") or message.get("unavailable")}
            rows[name] = message.get("row") or {"rows": [*known[name].rows], **refused}
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            yield gpu, rows
            if "row" not in message:
                break
        process.kill()
        process.join(PATIENCE)


def _hear(pipe: Connection) -> dict[str, Any]:
    try:
        if pipe.poll(PATIENCE):
            found: dict[str, Any] = json.loads(pipe.recv_bytes())
            return found
        return {"refused": f"not done after {PATIENCE:g} s"}
    except EOFError:
        return {"refused": "its process ended"}


# Records ----------------------------------------------------------------------------------------


def apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Latencies, in cycles, that two records have of the same probes."""
    both = {n: (r, b["probes"][n]) for n, r in a["probes"].items() if n in b["probes"]}
    return {
        name: (x["latency"][0], y["latency"][0])
        for name, (x, y) in both.items()
        if "latency" in x and "latency" in y
    }


def compare(first: Path, second: Path) -> int:
    """Prints how far latencies of two records are apart; 1 where one is too far."""
    pairs = apart(*(json.loads(p.read_text(encoding="utf-8")) for p in (first, second)))
    far = {n: abs(x - y) / max(abs(x), abs(y), 1e-9) for n, (x, y) in pairs.items()}
    wrong = [n for n, d in far.items() if d > MOST_APART]
    for name in sorted(far, key=lambda n: -far[n])[: max(len(wrong), 5)]:
        print(f"{name}: {pairs[name][0]:g} and {pairs[name][1]:g} cycles, {far[name]:.1%} apart")
    print(f"{len(pairs) - len(wrong)} of {len(pairs)} latencies agree within {MOST_APART:.0%}")
    return int(bool(wrong))


def as_text(record: Mapping[str, Any]) -> str:
    """A record as JSON, a line a probe."""
    lines = (f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in record["probes"].items())
    head = json.dumps({k: v for k, v in record.items() if k != "probes"})[:-1]
    return head + ', "probes": {\n' + ",\n".join(lines) + "\n}}\n"


@reports("microbench")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, brief="microbench")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the record goes")
    parser.add_argument("--like", default="", metavar="TEXT", help="only probes with it in a name")
    parser.add_argument("--jobs", type=positive_int, default=os.cpu_count() or 1,
                        help="ptxas processes at a time (default: one a core)")  # fmt: skip
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE",
                        help="two records: how far their latencies are apart")  # fmt: skip
    args = parser.parse_args(argv)
    if args.compare:
        return compare(*args.compare)
    if args.out is None:
        raise BadInput("--out FILE or --compare FILE FILE")
    wanted = [p for p in probes.probes().values() if args.like in p.name]
    built, refused = build(wanted, args.jobs)
    rows = {n: {"rows": [*probes.probes()[n].rows], "refused": why} for n, why in refused.items()}
    for gpu, timings in measure(built):  # kept as it grows: what cuts the run off costs the rest
        rows |= timings
        record = {"gpu": gpu, "ptxas": ptxas.version(), "repeats": REPEATS, "probes": rows}
        write_whole(args.out, as_text(record))
    for name, row in rows.items():
        if "refused" in row and row["refused"] != REMOVED:
            print(f"not timed: {name}: {row['refused']}")
    covered = {row for p in wanted for row in p.rows}
    missing = [a.name for a in all_atoms() if ARCH in a.archs and a.name not in covered]
    print(f"{len(rows)} probes of {len(covered)} rows; no probe: {' '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
