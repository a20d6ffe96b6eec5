"""flashinfer-bench's own harness on our Solutions and on libraries', over spread workloads.

    ptxflow harness DIR --libraries LIBRARIES

Makes a set of FlashInfer Trace in DIR: definitions, workloads with their files, a Solution of the
library LIBRARIES/NAME/ for each definition, and Solutions of torch's and FlashInfer's operators.
The harness (flashinfer-bench 0.1.2, on a GPU) runs them and writes traces, which are read back: the
table has microseconds by its clock, the mean of calls on fresh clones, the host's time included.
What a set has is not done again; `--report` only prints.

Three things are not its defaults: MoE in float8 has the tolerances of FlashInfer's own test; what
samplers draw is counted at once, where it asks the device for each token; and of top_k and top_p
together the second filters what the first leaves, renormalised, as definitions say.
"""

import importlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.library.manifest import MANIFEST, LibraryError, read_file, read_manifest
from ptxflow.env.tasks.arguments import find_problem, positive_int
from ptxflow.env.tasks.definition import Definition, load, names, parse
from ptxflow.env.tasks.workload import Workload, workloads
from ptxflow.eval.bench.inputs import make_indices, make_inputs
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.trace_set import Trace, read_traces, stored, write_traces
from ptxflow.eval.bench.work import attended
from ptxflow.eval.sample.peer_solutions import EAGER, peers
from ptxflow.eval.sample.solution import AUTHOR, solution

SEED = 1
MADE = ("generated", "recorded")  # what a row says of such inputs
QUERIES = {"q_nope", "q_pe"}  # but for these, whose scale alone is chosen
#: half a million draws say nothing of a whole vocabulary
LIMITS = {"top_k": (1, 100), "top_p": (0.05, 0.8)}
#: by op type, what of the harness's configuration is not its default
TOLERANCES = {"moe": {"atol": 0.1, "rtol": 0.2, "required_matched_ratio": 0.85}}
IDLE = ("num_pages", "len_indptr", "len_cu_seqlens")  # axes that are no work
MOST_DRAWN = 8  # rows of a sampler: the harness draws half a million times of each
BENCH = "flashinfer_bench.bench"


def usable(definition: Definition, row: Workload, ranges: Mapping[str, Sequence[int]]) -> bool:
    """Whether a library of these ranges serves the row, and every query sees a key: the harness
    takes an infinite lse for wrong."""
    inside = all(low <= row.axes[n] <= high for n, (low, high) in ranges.items())
    drawn = definition.op_type != "sampling" or row.axes["batch_size"] <= MOST_DRAWN
    if row.refusal or row.degenerate or not inside or not drawn:
        return False
    if "kv_indptr" not in definition.inputs:
        return True
    bound = definition.bind(row.axes)
    found = attended(bound, make_indices(definition, row.axes, SEED))
    return found.queries == bound.get("total_q", bound["len_indptr"] - 1)


def spread(
    definition: Definition, ranges: Mapping[str, Sequence[int]], count: int
) -> list[Workload]:
    """So many rows, evenly from the least to the largest by the logarithm of their work, public
    ones where there are some near."""
    rows = [row for row in workloads(definition.name) if usable(definition, row, ranges)]
    if not rows:
        raise BadInput(f"{definition.name}: its library serves none of its workloads")
    work = {
        row.uuid: math.log(math.prod(v for n, v in row.axes.items() if n not in IDLE))
        for row in rows
    }
    chosen: list[Workload] = []
    for target in np.linspace(min(work.values()), max(work.values()), min(count, len(rows))):
        away = [abs(work[row.uuid] - target) + (not row.public) for row in rows]
        chosen.append(rows.pop(int(np.argmin(away))))
    return chosen


def needed(row: Workload) -> set[str]:
    """The inputs of a row that must be valid; the harness draws the others."""
    return {n for n, spec in row.inputs.items() if spec["type"] in MADE} - QUERIES


def given(definition: Definition, row: Workload) -> dict[str, torch.Tensor]:
    """Those inputs by name, of one seed."""
    names = needed(row)
    made = make_indices(definition, row.axes, SEED) if names else {}
    if not names <= made.keys():
        made = make_inputs(definition, row.axes, SEED)
    made = {n: made[n].clamp(*LIMITS[n]) if n in LIMITS else made[n] for n in names}
    if "block_table" in made:
        made |= whole_scores(definition, made)
    if "sparse_indices" in made:  # a token without a key has an infinite lse
        lists = made["sparse_indices"]
        lists[:, 0] = torch.where((lists < 0).all(-1), 0, lists[:, 0])
    return made


def whole_scores(
    definition: Definition, made: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Inputs of the indexer whose scores are whole numbers that any order of additions finds, and
    of which the best differ: the harness compares its answer entry by entry."""
    constants, rng = definition.const_axes, torch.Generator().manual_seed(SEED)
    heads, dim, size = (constants[n] for n in ("num_index_heads", "index_head_dim", "page_size"))
    table, lengths = made["block_table"].long(), made["seq_lens"].tolist()
    cache = made["k_index_cache_fp8"].clone()
    shape = (len(cache), size, dim)
    keys = torch.randint(-8, 9, shape, generator=rng).to(torch.float8_e4m3fn)
    rows = cache.view(torch.uint8).flatten(1)
    rows[:, : size * dim] = keys.view(torch.uint8).flatten(1)
    rows[:, size * dim :] = torch.ones(len(cache), size).view(torch.uint8)
    q = torch.randint(-1, 2, (len(table), heads, dim), generator=rng).float()
    weights = torch.empty(len(table), heads)
    for b, length in enumerate(lengths):
        dots = keys[table[b, : -(-length // size)]].flatten(0, 1)[:length].float() @ q[b].T
        best = torch.zeros(2)
        while len(best.unique()) < len(best):
            weights[b] = torch.randint(1, 1 << 12, (heads,), generator=rng)
            scores = dots.relu() @ weights[b]
            best = scores.topk(min(length, constants["topk"] + 1)).values
    return {
        "q_index_fp8": q.to(torch.float8_e4m3fn),
        "k_index_cache_fp8": cache,
        "weights": weights,
    }


def prepare(root: Path, library: Path, count: int) -> None:
    """Put a definition into the set, with what runs it; nothing where it is there."""
    manifest = read_manifest(library)
    definition = parse(manifest.definition)
    place = Path(definition.op_type, definition.name)
    rows = root / "workloads" / place.with_suffix(".jsonl")
    if rows.exists():
        return
    files = {file.name: read_file(library, file) for file in manifest.files}
    data = solution(manifest, files, f"the library {library.name}")
    chosen = spread(definition, manifest.ranges, count)
    problem = find_problem(definition, chosen[0].axes)[1]
    for made in (data, *peers(definition, dict(problem.constants).get("eps"))):
        where = root / "solutions" / made["author"] / place / f"{made['name']}.json"
        write_whole(where, json.dumps(made) + "\n")
    write_whole(root / "definitions" / place.with_suffix(".json"), json.dumps(definition.to_json()))
    found = [stored(definition, row, root, given(definition, row)) for row in chosen]
    write_traces(rows, [Trace(row) for row in found])


def counted(runnable: Any, inputs: list[Any], device: str, definition: Any, num_trials: int) -> Any:
    """What the harness's function of that name returns, the frequencies of tokens by row
    [batch, vocabulary], of as many draws."""
    probs = inputs[list(definition.inputs).index("probs")]
    batch, vocabulary = probs.shape
    repeats = 10_000 // batch
    wide = [t.repeat(repeats, *[1] * (t.dim() - 1)) for t in inputs]
    row = torch.arange(batch, device=device).repeat(repeats) * vocabulary
    total = torch.zeros(batch * vocabulary, dtype=torch.int64, device=device)
    out = torch.empty(len(row), dtype=torch.int64, device=device)
    trials = -(-num_trials // repeats)
    for _ in range(trials):
        if runnable.metadata.destination_passing_style:
            runnable(*wide, out)
        else:
            out = runnable(*wide)
        total += torch.bincount(row + out.flatten(), minlength=len(total))
    return total.view(batch, vocabulary).float() / (trials * repeats)


def renormalised(plain: Any) -> Any:
    """The harness's function that says which tokens may be drawn [batch, vocabulary]; `plain`
    applies both filters to the whole distribution, and leaves out the token that reaches top_p,
    which of few tokens is no small one."""

    def mask(probs: Any, method: str, params: Mapping[str, Any], eps: float = 5e-2) -> Any:
        if method != "top_k_top_p":
            return plain(probs, method, params, eps)
        left = probs * plain(probs, "top_k", params, eps)
        order = (left / left.sum(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        before = order.values.cumsum(-1) - order.values
        among = (before < params["top_p"].view(-1, 1)) & (order.values > 0)
        return torch.zeros_like(among).scatter(-1, order.indices, among)

    return mask


def corrected() -> None:
    """Put `counted` and `renormalised` into the harness's evaluator of samplers."""
    sampling: Any = importlib.import_module(f"{BENCH}.evaluators.sampling")
    sampling._sample_token_distributions = counted
    sampling._compute_valid_sampling_mask = renormalised(sampling._compute_valid_sampling_mask)


def worker(*args: Any) -> None:
    """The harness's worker process, with its samplers' evaluator `corrected`."""
    corrected()
    importlib.import_module(f"{BENCH}.runner.persistent_runner")._persistent_worker_main(*args)


def run(root: Path, definitions: Sequence[str], trials: int, seconds: int) -> None:
    """The harness, over what has no trace yet. Raises BadInput where it is not installed."""
    try:
        bench = importlib.import_module(BENCH)
        runner: Any = importlib.import_module(f"{BENCH}.runner.persistent_runner")
        data = importlib.import_module("flashinfer_bench.data")
    except ImportError as error:
        raise BadInput(f"flashinfer-bench 0.1.2 is not installed: {error}") from None
    if not torch.cuda.is_available():
        raise BadInput("the set is made, and the harness runs on a GPU only: there is none")
    corrected()  # expectations are of this process
    runner._persistent_worker_main = worker  # of new processes, which import it by its name
    held = data.TraceSet.from_path(str(root))
    held.definitions = {name: held.definitions[name] for name in definitions}  # in this order
    groups = defaultdict[str, list[str]](list)
    for name in definitions:
        op = load(name).op_type
        groups[op if op in TOLERANCES else ""].append(name)
    for op, own in groups.items():
        config = bench.BenchmarkConfig(
            definitions=own, num_trials=trials, profile_baseline=False, timeout_seconds=seconds,
            **TOLERANCES.get(op, {}),
        )  # fmt: skip
        harness = bench.Benchmark(held, config)
        try:
            harness.run_all(resume=True)
        finally:
            harness.close()


# What came of it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A workload: microseconds by Solution, None of one that did not pass, the library's names
    without the definition."""

    definition: str
    sizes: str
    us: Mapping[str, float | None]
    status: Mapping[str, str]

    @property
    def own(self) -> float | None:
        return next((us for n, us in self.us.items() if n.startswith(f"{AUTHOR}_")), None)

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest library's name and time."""
        others = [(us, n) for n, us in self.us.items() if us and not n.startswith(f"{AUTHOR}_")]
        return min(others)[::-1] if others else None

    @property
    def ratio(self) -> float | None:
        """The fastest library's time over ours."""
        return self.best[1] / self.own if self.best and self.own else None


def rows_of(traces: Iterable[Trace]) -> list[Row]:
    """A row a workload; of one Solution's traces the last counts."""
    found: dict[tuple[str, str], dict[str, Trace]] = defaultdict(dict)
    for trace in traces:
        found[trace.definition, trace.workload.uuid][trace.solution or ""] = trace
    rows = []
    for (name, _), held in found.items():
        sizes = " ".join(f"{n}={v}" for n, v in next(iter(held.values())).workload.axes.items())
        known = {s.removesuffix(f"_{name}"): t.evaluation for s, t in held.items() if t.evaluation}
        times = {s: e.latency_us for s, e in known.items()}
        rows.append(Row(name, sizes, times, {s: e.status for s, e in known.items()}))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line a workload; then geometric means by op type, what did not pass, and where a library is
    faster."""
    ratios = defaultdict[str, list[float]](list)
    lines, slower = [], []
    for r in rows:
        best, ratio = r.best or ("-", None), r.ratio
        times = [f"{us:.1f}" if us else "-" for us in (r.own, best[1])]
        lines.append((r.definition, r.sizes, *times, best[0], f"{ratio:.2f}" if ratio else "-"))
        if ratio:
            eager = f", {EAGER}" if best[0] == EAGER else ""
            ratios[load(r.definition).op_type + eager].append(ratio)
            slower += [f"{r.definition} {r.sizes}: {ratio:.2f} of {best[0]}"] if ratio < 1 else []
    failed = [f"{r.definition} {r.sizes}: {name} {status}" for r in rows
              for name, status in r.status.items() if status != "PASSED"]  # fmt: skip
    means = [(op, len(of), f"{statistics.geometric_mean(of):.3f}", f"{min(of):.2f}")
             for op, of in ratios.items()]  # fmt: skip
    head = ("definition", "axes", "ours, us", "best library, us", "which", "ratio")
    parts = [markdown(head, lines)]
    parts += [markdown(("op type", "workloads", "geometric mean", "least"), means)] if means else []
    for what, found in (("did not pass", failed), ("a library is faster", slower)):
        parts += ["\n".join([f"{what}:", *found])] if found else []
    return "\n\n".join(parts)


@reports("harness", LibraryError)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 where all of ours passed; 1 otherwise."""
    parser = Parser(prog="ptxflow harness", description=__doc__)
    add = parser.add_argument
    add("set", type=Path, metavar="DIR",
        help="the set of FlashInfer Trace; with --report a file of traces, too")  # fmt: skip
    add("--libraries", type=Path, metavar="DIR", help="folders of sample.py, one a definition")
    add("--definitions", nargs="+", default=[], metavar="NAME", help="default: all that have one")
    add("--workloads", type=positive_int, default=4, metavar="N", help="a definition (default: 4)")
    add("--trials", type=positive_int, default=3, help="inputs of each workload (default: 3)")
    add("--timeout", type=positive_int, default=120, help="seconds of one (default: 120)")
    add("--report", action="store_true", help="print what traces say, and run nothing")
    args = parser.parse_args(argv)
    root: Path = args.set
    asked = args.definitions or names()
    if not args.report:
        if args.libraries is None:
            parser.error("--libraries are needed, or --report")
        made = [n for n in asked if (args.libraries / n / MANIFEST).exists()]
        if not made:
            raise BadInput(f"{args.libraries}: no folder of a definition with a library")
        for name in tqdm(made, desc="prepare"):
            prepare(root, args.libraries / name, args.workloads)
        run(root, made, args.trials, args.timeout)
    whole = root.is_dir()
    rows = rows_of(t for t in read_traces(root / "traces" if whole else root)
                   if t.definition in asked)  # fmt: skip
    held = [row.definition for row in rows]
    if whole:
        held = [t.definition for t in read_traces(root / "workloads") if t.definition in asked]
    print(table(rows))
    passed = sum(row.own is not None for row in rows)
    print(f"\nours: {passed} of {len(held)} workloads PASSED, of {len({*held})} definitions")
    return 0 if held and passed == len(held) else 1
