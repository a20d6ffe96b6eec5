"""What a coding agent asks of ptxflow: a function a tool, JSON values in and out.

Their docstrings are what a model reads. They run in a child process of the server; a BadInput is an
answer of one line. What they put under `texts` the server keeps as resources, by address.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ptxflow.command import BadInput
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Choice, Fields, Problem, Strategy
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.tasks import definition as definitions_
from ptxflow.env.tasks.arguments import find_family
from ptxflow.env.tasks.definition_table import axes_text
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.agents.desk import (
    Axes,
    Choices,
    Desk,
    DeviceName,
    Json,
    NameOrPath,
    Wide,
    Workload,
)
from ptxflow.eval.agents.texts import check_ptx, instruction, launch_template, read_text
from ptxflow.eval.bench.roofline import Floors

if TYPE_CHECKING:
    from ptxflow.eval.verify.glue import Glue

MOST_DRAWN = 32


# What there is to build ---------------------------------------------------------------------------


def definitions(
    desk: Desk, like: Annotated[str, "part of a name, an op type or a family"] = ""
) -> Json:
    """List the operator definitions that kernels can be built for: begin here.

    Each has its op type, kernel family and variable axes with a typical value and, in brackets, the
    range that policies were trained on; other values work too. Definitions of your own are JSON
    files of the same schema (read one as an example with `definition`).
    """
    rows = []
    for name in (*definitions_.names(), *definitions_.own_names()):
        found = definitions_.load(name)
        family = find_family(found).name
        if any(like in text for text in (name, found.op_type, family)):
            rows.append({"name": name, "op": found.op_type, "family": family,
                         "axes": axes_text(found)})  # fmt: skip
    return {"definitions": rows}


def definition(desk: Desk, name: NameOrPath) -> Json:
    """Read one definition: axes, constraints, inputs and outputs with shapes and dtypes, a few of
    its recorded workloads, and the reference program that says what is right."""
    data = desk.definition(name).to_json()
    known = name in definitions_.names()
    rows = [dict(w.axes) for w in workloads(name) if not w.refusal] if known else []
    step = max(1, len(rows) // 8)
    reference = data.pop("reference", "")
    return data | {"workloads": rows[::step][:8], "workloads_in_all": len(rows),
                   "texts": {"reference.py": reference}}  # fmt: skip


def roofline(
    desk: Desk,
    definition: NameOrPath,
    axes: Axes = None,
    device: DeviceName = "b200",
    us: Annotated[float | None, "a kernel's measured microseconds, to see its gaps"] = None,
) -> Json:
    """How fast a kernel for a workload could be: floors by tensor cores, memory and launch, and
    with `us` what share of them a kernel reaches and where it falls short (gaps from 0 to 1)."""
    from ptxflow.eval.bench.work import counted
    from ptxflow.eval.tune.gaps import Gaps

    work = Workload.of(desk, definition, axes, device)
    problem = counted(work.definition, work.axes)
    floors = Floors.of(problem, work.device)
    out: Json = {
        "workload": str(work), "flops": problem.flops, "bytes": problem.bytes,
        "bound": floors.bound, "floors_us": asdict(floors), "attainable_us": floors.attainable,
    }  # fmt: skip
    if us is None:
        return out
    if not (math.isfinite(us) and us > 0):
        raise BadInput("us must be a positive number")
    gaps = Gaps.of(floors, us)
    return out | {"us": us, "share_of_attainable": floors.share(us), "gaps": gaps.by_axis}


# Strategies ---------------------------------------------------------------------------------------


def space(
    desk: Desk,
    definition: NameOrPath,
    axes: Axes = None,
    device: DeviceName = "b200",
    fixed: Annotated[
        dict[str, Choice | list[Choice]] | None, "decisions made already, or what each may be"
    ] = None,
    wide: Wide = False,
) -> Json:
    """The decisions of a kernel strategy, and which are still open.

    Of each decision it gives the meaning, the choices, and how many valid strategies are left with
    each: 0 means that the rules refuse it beside what is fixed. Fix some, call again, until one
    strategy is left. `rules` are the sentences that refuse, with the decisions that each reads.
    """
    work = Workload.of(desk, definition, axes, device)
    found = work.space(wide, fixed)
    return {
        "workload": str(work), "family": work.family.name, "strategies": len(found),
        "decisions": [
            {"name": d.name, "doc": d.doc, "choices": [*d.choices], "left": left}
            for d, left in zip(found.decisions, left_by_choice(found), strict=True)
        ],
        "rules": [{"rule": r.sentence, "reads": [*r.reads]} for r in found.family.rules],
    }  # fmt: skip


def left_by_choice(space: RelationSpace) -> list[list[int]]:
    """Of each decision the strategies with each choice: the counts after it, times the ways to come
    to its node."""
    ways, out = np.ones(1), []
    for layer in space.layers:
        out.append([int(n) for n in ways @ layer.counts.astype(float)])
        after = np.zeros(int(layer.child.max()) + 1)
        for child in layer.child.T:
            np.add.at(after, child[child >= 0], ways[child >= 0])
        ways = after
    return out


def sample(
    desk: Desk,
    definition: NameOrPath,
    axes: Axes = None,
    device: DeviceName = "b200",
    k: Annotated[int, f"how many, 1 to {MOST_DRAWN}"] = 4,
    fixed: Annotated[
        dict[str, Choice | list[Choice]] | None, "decisions to keep; the policy draws the others"
    ] = None,
    seed: Annotated[int, "another seed, other strategies"] = 0,
) -> Json:
    """Draw distinct strategies from the policy that was trained on this device's kernels, all
    valid, best predicted first. Times are predicted (`predicted_by`), not measured."""
    from ptxflow.env.space import Space
    from ptxflow.eval.sample.draws import usual_checkpoint
    from ptxflow.eval.sample.selection import far_from_training, reward_of
    from ptxflow.gfn.inference import load_policy, sample_by_steps, with_family

    if not 1 <= k <= MOST_DRAWN or seed < 0:
        raise BadInput(f"k must be from 1 to {MOST_DRAWN}, and seed not negative")
    work = Workload.of(desk, definition, axes, device)
    part = work.space(False, fixed)
    policy = load_policy(usual_checkpoint(device, work.definition, work.axes))
    far = far_from_training(policy.about, work.definition, work.axes)
    codes, logs = sample_by_steps(with_family(policy, part), part, k, seed)
    order = np.argsort(codes)
    listed = Space(work.family, work.problem, work.device, codes[order])
    reward, remarks = reward_of(policy.about, work.device.name, work.family.name)
    speeds = reward.tflops(listed, listed.codes)
    rows = [
        {"key": s.key, "predicted_us": round(work.problem.flops / speeds[i] / 1e6, 2),
         "log_p": round(float(logs[order][i]), 2), "choices": work.family.choices(s)}
        for i in np.argsort(-speeds) for s in [listed.strategy(int(listed.codes[i]))]
    ]  # fmt: skip
    trained = [f"far from what the policy was trained on: {far}"] if far else []
    return {"workload": str(work), "valid": len(part), "predicted_by": reward.name,
            "strategies": rows, "remarks": [*remarks, *trained]}  # fmt: skip


def check_strategy(
    desk: Desk,
    definition: NameOrPath,
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
) -> Json:
    """Whether a strategy is valid for a workload, in milliseconds, and if not why.

    A refusal is the sentence of a rule, with the choices that it read. `nearest` is the valid
    strategy that differs in the fewest decisions, `change` what it changes.
    """
    work = Workload.of(desk, definition, axes, device)
    strategy = work.strategy(choices)
    family = work.family.wide
    held = family.choices(strategy)
    broken = [
        {"rule": r.sentence, "read": {n: held[n] for n in r.reads if n in held}}
        for r in family.rules
        if not np.all(r.legal(Fields(held), work.problem, work.device))
    ]
    out: Json = {"workload": str(work), "valid": not broken, "key": strategy.key}
    if not broken:
        return out
    near = nearest(relate(family, work.problem, work.device), held)
    change = {n: c for n, c in near.items() if held[n] != c}
    return out | {"refusals": broken, "change": change, "nearest": near}


def nearest(space: RelationSpace, held: Mapping[str, Choice]) -> dict[str, Choice]:
    """The choices of a valid strategy that differs from these in the fewest decisions."""
    after, picks = np.zeros(1), []
    for decision, layer in reversed(list(zip(space.decisions, space.layers, strict=True))):
        cost = np.array([float(c != held[decision.name]) for c in decision.choices])
        total = np.where(layer.counts > 0, cost + after[np.maximum(layer.child, 0)], np.inf)
        picks.append(total.argmin(1))
        after = total.min(1)
    node, out = 0, dict[str, Choice]()
    for decision, layer, pick in zip(space.decisions, space.layers, reversed(picks), strict=True):
        out[decision.name] = decision.choices[int(pick[node])]
        node = int(layer.child[node, pick[node]])
    return out


def lower(
    desk: Desk,
    definition: NameOrPath,
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
    emulate: Annotated[
        bool, "run the PTX on small problems, on the CPU, against exact values"
    ] = True,
    out: Annotated[str, "a folder under the root for kernel.ptx, kernel.cubin, launch.json"] = "",
) -> Json:
    """Compile a strategy: rules, validator, PTX, ptxas, checked machine code, emulator. No GPU.

    `right` is the verdict, `stage` and `why` what refused it. `usage` is what ptxas reports
    (registers a thread, spills in bytes), `sass` how often each claimed technique is in the machine
    code, `checks` what the validator proved. The PTX is a resource: `read_text` shows parts of it.
    """
    from ptxflow.compiler.backend.ptxas import PtxasError
    from ptxflow.compiler.compilation import compile_kernel
    from ptxflow.compiler.files import write_whole
    from ptxflow.eval.verify.emulation import cached_emulation

    work = Workload.of(desk, definition, axes, device)
    strategy = work.strategy(choices)
    found: Json = {"workload": str(work), "key": strategy.key}
    folder = desk.path(out) if out else None
    desk.say("compiling")
    try:
        kernel = compile_kernel(work.problem, strategy, work.device)
    except (CompileError, PtxasError) as error:
        return found | {"right": False, "stage": type(error).__name__, "why": str(error)}
    found |= {
        "right": True, "usage": asdict(kernel.usage), "cubin_bytes": len(kernel.cubin),
        "sass": dict(kernel.sass.counts), "checks": [*kernel.checks],
        "texts": {"kernel.ptx": kernel.ptx,
                  "launch.json": json.dumps(kernel.launch.to_json(), indent=1)},
    }  # fmt: skip
    if emulate:
        desk.say("emulating")
        run = cached_emulation(work.problem, strategy, work.device)
        found |= {"right": run.right, "emulation": str(run)}
        if not run.right:
            found |= {"stage": "emulator", "why": run.complaints[0]}
    if folder:
        for name, text in found["texts"].items():
            write_whole(folder / name, text)
        write_whole(folder / "kernel.cubin", kernel.cubin)
        found["written"] = str(folder)
    return found


def epilogue(
    desk: Desk,
    definition: Annotated[str, "of a plain GEMM: its N, K and dtype"],
    expression: Annotated[str, "as 'h = acc + bias; silu(h) * up'"],
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
) -> Json:
    """Compile a GEMM with an epilogue of your own, written as an expression: no PTX, no GPU.

    `acc` is the accumulator; `bias` [N], `up` and `residual` [M, N] are read where they are named;
    names may be assigned before. There are numbers, + - * / and exp, exp2, log2, rsqrt, sigmoid,
    silu, relu, abs, tanh, gelu_tanh, max, min. `choices` are a GEMM's (`sample`). The kernel goes
    through every stage of `lower`, and its values are compared with those of torch in float64.
    """
    from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue
    from ptxflow.eval.verify import glue

    def parsed(p: Problem, s: Strategy) -> Glued:
        text = Epilogue.parse(expression)
        return glue.written(text), *glue.given(p, s, text), {"reads": [*text.reads]}

    return _glued(desk, Workload.of(desk, definition, axes, device), "gemm", choices, parsed)


def mask(
    desk: Desk,
    definition: Annotated[str, "of causal attention of packed queries (gqa_ragged, gqa_paged)"],
    condition: Annotated[str, "as 'q - k < 256 or k < 4'"],
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
) -> Json:
    """Compile an attention prefill with a mask of your own beside causality, written as a condition
    of whole numbers: no PTX, no GPU.

    `q` and `k` are the places of query and key among the tokens of their sequence, `keys` how many
    these are, `queries` how many of them ask. There are numbers, + - *, // and % by a number above
    0 (they round down), comparisons, and, or, not. A window: 'q - k < 256'; documents of 512
    tokens: 'q // 512 == k // 512'. `choices` are the family's (`sample`). The kernel goes through
    every stage of `lower`, and its values are compared with those in float64, where the mask hides
    some keys and not others. Tiles of keys that it hides are not skipped.
    """
    from ptxflow.compiler.kernels.gqa_prefill.mask import Mask
    from ptxflow.eval.verify import glue

    def parsed(p: Problem, s: Strategy) -> Glued:
        return glue.attended(Mask.parse(condition)), p, s, {}

    return _glued(desk, Workload.of(desk, definition, axes, device), "gqa_prefill", choices, parsed)


def index_map(
    desk: Desk,
    definition: Annotated[str, "of causal attention of packed queries over pages (gqa_paged)"],
    entry: Annotated[str, "as 'page % 8'"],
    width: Annotated[int, "entries of a sequence in the page table"],
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
    condition: Annotated[str, "of `mask`, beside it; empty: none"] = "",
) -> Json:
    """Compile an attention prefill whose page table is laid out in your own way, written as an
    expression of whole numbers: no PTX, no GPU.

    kv_indices is [sequences, width] then, and kv_indptr only says how many pages a sequence has.
    `entry` is where a sequence's row has the page number `page`, from 0, of its `pages`. There are
    numbers, + - *, // and % by a number above 0, min, max. A row a sequence: 'min(page, 63)'; a
    ring of 8 pages: 'page % 8'; behind one that stays: 'min(page, 1) + max(page - 1, 0) % 7'. It
    must be from 0 to width - 1 whatever page and pages are. What a ring has overwritten, a
    `condition` should hide. The kernel goes through every stage of `lower`, and its values are
    compared with those in float64 where some page is elsewhere than in its own place.
    """
    from ptxflow.compiler.kernels.gqa_prefill.mask import Mask
    from ptxflow.compiler.kernels.gqa_prefill.page_map import PageMap
    from ptxflow.eval.verify import glue

    def parsed(p: Problem, s: Strategy) -> Glued:
        mask = Mask.parse(condition) if condition else None
        return glue.attended(mask, PageMap.parse(entry, width)), p, s, {}

    return _glued(desk, Workload.of(desk, definition, axes, device), "gqa_prefill", choices, parsed)


#: a kernel with a part that was written, what it is built for, and what is said of it
Glued = tuple["Glue", Problem, Strategy, Json]


def _glued(
    desk: Desk, work: Workload, family: str, choices: Choices,
    parsed: Callable[[Problem, Strategy], Glued],
) -> Json:  # fmt: skip
    """A part that was written, refused or compiled and emulated."""
    from ptxflow.compiler.backend.ptxas import PtxasError

    if work.family.name != family:
        raise BadInput(f"{work.definition.name} is of {work.family.name}, not of {family}")
    found: Json = {"workload": str(work)}
    try:
        glue, p, s, more = parsed(work.problem, work.strategy(choices))
        desk.say("compiling")
        kernel = glue.compiled(p, s, work.device)
        desk.say("emulating")
        wrong = glue.emulated(p, s, work.device)
    except (CompileError, PtxasError) as error:
        return found | {"right": False, "stage": type(error).__name__, "why": str(error)}
    found |= more | {"right": not wrong, "usage": asdict(kernel.usage)}
    texts = {"kernel.ptx": kernel.ptx, "launch.json": json.dumps(kernel.launch.to_json(), indent=1)}
    return found | ({"stage": "emulator", "why": wrong} if wrong else {}) | {"texts": texts}


def measure(
    desk: Desk,
    definition: NameOrPath,
    choices: Choices,
    axes: Axes = None,
    device: DeviceName = "b200",
    records: Annotated[
        str, "a file under the root; what it holds is not measured again"
    ] = "mcp.jsonl",
) -> Json:
    """Check and time a strategy's kernel on this machine's GPU, beside a yardstick in the same
    rounds: fresh random inputs, L2 flushed, medians. Says so where there is no such GPU."""
    from ptxflow.eval.bench.candidates import Candidate
    from ptxflow.eval.bench.measurer import open_measurer

    work = Workload.of(desk, definition, axes, device)
    strategy, path = work.strategy(choices), desk.path(records)
    with open_measurer(path, work.device, [work.family], "mcp", 1) as measurer:
        desk.say("measuring")
        candidate = Candidate(work.definition, work.family, work.problem, strategy, work.device)
        (record,) = measurer([candidate])
    return {"workload": str(work), "key": strategy.key, "status": record.status,
            "detail": record.detail, "latency_us": record.latency_us, "peers_us": record.peers,
            "tflops": record.tflops, "gpu": record.gpu.get("name", "")}  # fmt: skip


def knowledge(
    desk: Desk,
    path: Annotated[str, "a knowledge base of `ptxflow tune`, under the root"],
    like: Annotated[str, "part of a state or of a move: a family, a bottleneck"] = "",
) -> Json:
    """What tuning sessions learned: which moves helped in which state (family, largest gaps, FLOP
    per byte), how often, and the mean gain ln(time before / time after); most tried first."""
    from ptxflow.eval.tune.knowledge import Knowledge

    found = desk.path(path)
    if not found.is_file():
        raise BadInput(f"{path}: no such file")
    rows = [e for e in Knowledge(found).entries() if like in e.state or like in e.move]
    rows.sort(key=lambda e: -e.tried)
    shown = [
        {"state": e.state, "move": e.move, "device": e.device, "tried": e.tried,
         "helped": e.helped, "mean_gain": round(e.gain / e.tried, 4)}
        for e in rows[:40] if e.tried
    ]  # fmt: skip
    return {"entries": shown, "in_all": len(rows)}


def records(desk: Desk, name: str) -> Json:
    """Of a definition the fastest right measured kernel at each size on each device."""
    from ptxflow.__main__ import data
    from ptxflow.eval.bench.measurer import seconds
    from ptxflow.eval.bench.records import Record, read_records

    best: dict[tuple[str, str], Record] = {}
    for path in sorted((data("eval") / "measurements").glob("*.jsonl.xz")):
        for r in read_records(path):
            if r.definition == name and r.status == "ok":
                key = r.device, json.dumps(r.axes)
                held = best.get(key)
                if held is None or seconds(r) < seconds(held):
                    best[key] = r
    rows = [
        {"device": r.device, "axes": r.axes, "us": round(1e6 * seconds(r), 3),
         "best_library_over_ours": r.ratio, "choices": r.strategy["choices"]}
        for r in best.values()
    ]  # fmt: skip
    return {"definition": name, "fastest": rows}


Tool = Callable[..., Json]
TOOLS: dict[str, Tool] = {
    tool.__name__: tool
    for tool in (
        definitions, definition, roofline, space, sample, check_strategy, lower, epilogue, mask,
        index_map, measure, knowledge, launch_template, check_ptx, instruction, read_text,
    )
}  # fmt: skip
WRITERS: Sequence[str] = ("lower", "measure")  # they write where they are told to, under the root
