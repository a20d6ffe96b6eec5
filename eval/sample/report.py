"""What sample.py leaves on disk: per kernel PTX, cubin, strategy and report; summaries and a plot.

Pure functions of the samples: the same samples give the same bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ptxflow import __version__
from ptxflow.command import align
from ptxflow.compiler.launch import Launch
from ptxflow.eval.bench.baselines import is_eager_reference
from ptxflow.eval.bench.disagreement import named
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.records import Record, libraries
from ptxflow.eval.bench.report import EAGER, baseline_name
from ptxflow.eval.bench.roofline import TENSOR_PEAK
from ptxflow.eval.sample.plot import sample_plot
from ptxflow.eval.sample.samples import Run, Sample

Json = dict[str, Any]
TABLE_WIDTH = 110


def file_stem(position: int, sample: Sample) -> str:
    return f"rank-{position:02d}-{sample.key}"


def strategy_json(run: Run, sample: Sample) -> Json:
    """The strategy as the bench command reads it: definition, axes, family and choices."""
    return {
        "definition": run.problem.definition if run.known else run.definition,
        "axes": dict(run.axes),
        **sample.kernel.strategy.to_json(),
        "key": sample.key,
    }


def summary_json(run: Run) -> Json:
    """Everything about the run but the code itself."""
    kernels = []
    for position, sample in enumerate(run.samples, 1):
        kernels.append(
            strategy_json(run, sample)
            | {
                "rank": position,
                "file": file_stem(position, sample),
                "from": sample.source,
                "log_prob": sample.log_prob,
                "place": sample.place,
                **sample.derived,
                "predicted_tflops": sample.predicted,
                **_predicted_json(run, sample),
                "ptxas": asdict(sample.kernel.usage),
                "sass": sample.kernel.sass.counts,
                "measured": _measured_json(run, sample.record),
            }
        )
    return {
        "ptxflow": __version__,
        "definition": run.problem.definition,
        "axes": dict(run.problem.axes),
        "device": run.device.name,
        "arch": run.device.arch,
        "checkpoint": run.checkpoint,
        "remarks": list(run.remarks),
        "seed": run.seed,
        "space": run.valid,
        "scored": len(run.predicted),
        "predicted_by": run.predicted_by,
        "ranked_by": run.ranked_by,
        "stop_at": run.stop_at,
        "bound_by": run.floors.bound,
        "floors_us": asdict(run.floors) | {"attainable": run.floors.attainable},
        "kernels": kernels,
        "refused": [
            {"key": strategy.key, "error": type(error).__name__, "message": str(error)}
            for strategy, error in run.refused
        ],
    }


def _predicted_json(run: Run, sample: Sample) -> Json:
    """The time, and the share of the roof in `bound_by`; None for a kernel that is predicted to
    fail."""
    us = run.us(sample.predicted)
    known = math.isfinite(us)
    return {
        "predicted_us": us if known else None,
        "predicted_share_of_bound": run.floors.share_of_bound(us) if known else None,
    }


def _measured_json(run: Run, record: Record | None) -> Json | None:
    if record is None:
        return None
    kept = ("status", "detail", "latency_us", "ratio", "tflops", "check", "timing")
    us = record.latency_us["median"] if record.latency_us else None
    return {name: getattr(record, name) for name in kept} | {
        "share_of_bound": run.floors.share_of_bound(us) if us else None,
        "peers_us": record.peers,
        "eager_references": [n for n in record.peers if is_eager_reference(record.definition, n)],
    }


def sample_table(run: Run) -> str:
    """The samples for the terminal and for report.md, one line each.

    Times are microseconds. The share is that of the roof that bounds the problem, measured where
    there is a measurement; TFLOP/s stand where that roof is arithmetic.
    """
    best = float(run.predicted.max())
    peer = _beside(run)
    rows = [["rank", "key", "from", f"{run.predicted_by} us", "of best", "log p"]]
    if run.measured:
        rows[0] += ["status", "us"]
    rows[0] += _speed_heads(run)
    if run.measured:
        rows[0] += ["of attainable", f"/ {peer}"]
    for position, sample in enumerate(run.samples, 1):
        row = [str(position), sample.key, sample.source, _us(run.us(sample.predicted))]
        row += [f"{sample.predicted / best:.1%}", f"{sample.log_prob:.2f}"]
        if not run.measured:
            row += _speed_cells(run, run.us(sample.predicted))
        else:
            row += _measured_cells(run, sample.record, peer)
        rows.append(row)
    return align(_with_decisions(rows, run))


def _us(value: float) -> str:
    """Microseconds to three digits or more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _speed_heads(run: Run) -> list[str]:
    tflops = ["TFLOP/s"] if run.floors.bound == TENSOR_PEAK else []
    return [*tflops, f"of {run.floors.bound}"]


def _speed_cells(run: Run, us: float) -> list[str]:
    share = run.floors.share_of_bound(us)
    peak = share * run.problem.peak_tflops(run.device)
    return [*([f"{peak:.1f}"] if run.floors.bound == TENSOR_PEAK else []), f"{share:.1%}"]


def _beside(run: Run) -> str:
    """What measured kernels are compared with: the fastest library, or `best baseline` where these
    are several, or an eager reference where there is no library."""
    records = [s.record for s in run.samples if s.record is not None]
    if any(libraries(r.definition, r.peers) for r in records):
        return baseline_name(records)
    return EAGER


def _with_decisions(rows: Sequence[list[str]], run: Run) -> Sequence[list[str]]:
    """The rows with the decisions in which the samples differ, as many as the width allows."""
    for decision in run.family.decisions:
        cells = [str(_choice(run, sample, decision.name)) for sample in run.samples]
        wider = [[*row, cell] for row, cell in zip(rows, [decision.name, *cells], strict=True)]
        if len(set(cells)) > 1 and len(align(wider).partition("\n")[0]) <= TABLE_WIDTH:
            rows = wider
    return rows


def _measured_cells(run: Run, record: Record | None, peer: str) -> list[str]:
    if record is None or record.latency_us is None:
        return [record.status if record else "-", *["-"] * (3 + len(_speed_heads(run)))]
    us = record.latency_us["median"]
    ratio = _to_eager(record, us) if peer == EAGER else record.ratio
    shown = f"{ratio:.2f}" if ratio is not None else "-"
    share = f"{run.floors.share(us):.1%}"
    return [record.status, _us(us), *_speed_cells(run, us), share, shown]


def _to_eager(record: Record, us: float) -> float | None:
    found = [t for n, t in record.peers.items() if is_eager_reference(record.definition, n)]
    return min(found) / us if found else None


def _choice(run: Run, sample: Sample, name: str) -> Any:
    return run.family.choices(sample.kernel.strategy)[name]


def summary_markdown(run: Run) -> str:
    """report.md: the run in one page."""
    predicted = [s.predicted for s in run.samples]
    best = float(run.predicted.max())
    lines = [
        f"# {run.title}",
        "",
        f"{len(run.samples)} of {run.valid:,} valid strategies, {_origins(run)}; "
        f"ranked by {run.ranked_by}.",
        "",
        "```",
        sample_table(run),
        "```",
        "",
    ]
    if predicted:
        lines += [
            f"- {run.predicted_by}: best sample {_us(run.us(max(predicted)))} us, "
            f"{max(predicted) / best:.1%} of "
            f"the best of the {run.scored} ({_us(run.us(best))} us), whose median is "
            f"{_us(run.us(float(np.median(run.predicted))))} us",
            f"- bound by the {run.floors.bound}: {_us(run.floors.attainable)} us at best, a launch "
            "in it",
        ]
    times = [s.latency_us for s in run.samples if s.latency_us is not None]
    if times:
        lines.append(f"- fastest: {run.floors.gaps(min(times))}")
    lines += [f"- {remark}" for remark in run.remarks]
    if run.stopped:
        lines.append(f"- {run.stopped}")
    if not run.measured:
        lines.append("- nothing was measured here: these figures are predictions")
    lines += [f"- refused: {s.key}: {type(e).__name__}: {e}" for s, e in run.refused]
    if run.samples:
        lines += ["", "![predicted times of the samples in the space](samples.png)"]
    return "\n".join([*lines, ""])


def _origins(run: Run) -> str:
    """How many were drawn from which policy, and how many are the reward's best."""
    drawn = sum(s.source == "policy" for s in run.samples)
    parts = [f"{drawn} drawn from {run.checkpoint} with seed {run.seed}"] if drawn else []
    if best := len(run.samples) - drawn:
        parts.append(f"{best} the best by the {run.predicted_by}")
    return ", ".join(parts)


def kernel_markdown(run: Run, sample: Sample, position: int) -> str:
    """rank-NN-KEY.report.md: one kernel, decision by decision."""
    choices = [(d.name, _choice(run, sample, d.name), d.doc) for d in run.family.decisions]
    sections = [
        f"# {run.title}: rank {position}, strategy {sample.key}",
        "## Strategy\n\n" + markdown(("decision", "choice", "meaning"), choices, left=3),
        "## Derived\n\n" + _derived_rows(run, sample),
        "## Performance\n\n" + _performance(run, sample),
        "## Launch\n\n" + _launch_rows(sample),
        "## ptxas\n\n" + _pairs(asdict(sample.kernel.usage), ("report", "value")),
        "## Machine code\n\n" + _pairs(sample.kernel.sass.counts, ("technique", "count")),
        "## Validated\n\n" + "\n".join(f"- {check}" for check in _validated(sample)),
    ]
    return "\n\n".join(sections) + "\n"


def _validated(sample: Sample) -> list[str]:
    emulated = "no" if sample.emulation is None else str(sample.emulation)
    return [*sample.kernel.checks, f"emulated: {emulated}"]


def _derived_rows(run: Run, sample: Sample) -> str:
    d = sample.derived
    rows = [
        ("shared memory of a block", f"{d['smem_bytes']:,} of {run.device.smem_per_block:,} bytes"),
        ("registers of a thread", f"{d['registers_per_thread']} at most"),
        ("threads of a block", d["threads"]),
        ("TMEM columns", f"{d['tmem_columns']} of {run.device.tmem_columns}"),
        ("blocks an SM holds", d["occupancy"]),
        ("bound", d["bound"]),
    ]
    return markdown(("resource", "value"), rows, left=2)


def _performance(run: Run, sample: Sample) -> str:
    d, us = sample.derived, run.us(sample.predicted)
    lines = [
        f"- {run.predicted_by}: {_us(us)} us, {run.floors.share_of_bound(us):.1%} of the "
        f"{run.floors.bound}, {sample.predicted:.2f} TFLOP/s; place {sample.place:,} of "
        f"{len(run.predicted):,}",
        f"- from the {sample.source}; the policy's log-probability {sample.log_prob:.3f} "
        f"(uniform: {-math.log(run.valid):.3f})",
    ]
    if run.predicted_by != "model":
        lines.append(f"- model: {_us(d['modelled_us'])} us ({d['modelled_tflops']:.2f} TFLOP/s)")
    record = sample.record
    if record is None:
        return "\n".join([*lines, f"- as predicted: {run.floors.gaps(us)}", "- measured: no"])
    if record.latency_us is None:
        return "\n".join([*lines, f"- measured: {record.status}: {record.detail}"])
    times = record.latency_us
    lines.append(
        f"- measured on {record.gpu['name']}: {times['median']:.2f} us median "
        f"({times['q1']:.2f} to {times['q3']:.2f}), {record.tflops or 0:.2f} TFLOP/s, "
        f"{run.floors.share_of_bound(times['median']):.1%} of the {run.floors.bound}, "
        f"{record.status}"
    )
    lines.append(f"- {run.floors.gaps(times['median'])}")
    lines += [
        f"- {named(name, record.disagree)}"
        f"{f', an {EAGER},' * is_eager_reference(record.definition, name)} in the same run: "
        f"{us:.2f} us"
        for name, us in record.peers.items()
    ]
    lines.append(f"- checked on {len(record.check['seeds'])} fresh inputs, largest error "
                 f"{record.check['max_error_ratio'] or 0:.2f} of the tolerance")  # fmt: skip
    return "\n".join(lines)


def _launch_rows(sample: Sample) -> str:
    steps = sample.kernel.launch.steps
    rows: list[tuple[Any, ...]] = [
        ("entry", *(f"`{step.entry}`" for step in steps)),
        ("grid", *(" x ".join(f"`{g}`" for g in step.grid) for step in steps)),
        ("block", *(step.block for step in steps)),
        ("cluster", *(" x ".join(map(str, step.cluster)) for step in steps)),
        ("dynamic shared memory", *(f"{step.smem_bytes:,} bytes" for step in steps)),
    ]
    table = markdown(("launch", *["value"] * len(steps)), rows, left=1 + len(steps))
    return table + _markdown_workspace(sample.kernel.launch)


def _markdown_workspace(launch: Launch) -> str:
    """Memory that kernels hand on, where there is some."""
    rows = [(w.name, f"`{w.bytes}`") for w in launch.workspace]
    return markdown(("workspace", "bytes"), rows, left=2) if rows else ""


def _pairs(data: Mapping[str, Any], head: tuple[str, str]) -> str:
    return markdown(head, data.items(), left=2)


def write_run(run: Run, folder: Path, solution: Json | None) -> None:
    """Every file of the run, into an existing empty folder."""
    for position, sample in enumerate(run.samples, 1):
        stem = folder / file_stem(position, sample)
        stem.with_suffix(".ptx").write_text(sample.kernel.ptx)
        stem.with_suffix(".cubin").write_bytes(sample.kernel.cubin)
        _write_json(stem.with_suffix(".strategy.json"), strategy_json(run, sample))
        stem.with_suffix(".report.md").write_text(kernel_markdown(run, sample, position))
    if solution is not None:
        _write_json(folder / "solution.json", solution)
    _write_json(folder / "summary.json", summary_json(run))
    (folder / "report.md").write_text(summary_markdown(run))
    if run.samples:
        sample_plot(run, folder / "samples.png")


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
