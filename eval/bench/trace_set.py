"""FlashInfer Trace records: what flashinfer-bench reads and writes, in its 0.1.2 schema.

A set is a folder: definitions/OP/NAME.json, workloads/OP/NAME.jsonl, solutions/**/*.json,
traces/OP/NAME.jsonl, and safetensors files, whose paths in workloads are from the folder. Whatever
is wrong with a record is a TraceError of one line.
"""

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ptxflow.command import BadInput
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.workload import Workload

Json = dict[str, Any]
ELSEWHERE = "flashinfer-trace"  # source of a row that names none
#: by status, whether an evaluation has correctness and performance
STATUSES = {
    "PASSED": (True, True), "INCORRECT_NUMERICAL": (True, False),
    **dict.fromkeys(("INCORRECT_SHAPE", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR",
                     "TIMEOUT"), (False, False)),
}  # fmt: skip
#: by type, what an input of a workload says
INPUTS = {"random": (), "scalar": ("value",), "safetensors": ("path", "tensor_key")}
ERRORS = ("max_absolute_error", "max_relative_error")
TIMES = ("latency_ms", "reference_latency_ms", "speedup_factor")
_OURS = {"ok": "PASSED", "wrong": "INCORRECT_NUMERICAL", "hang": "TIMEOUT"}


class TraceError(BadInput):
    """A record that does not fit the schema, or whose files do not fit it."""


@dataclass(frozen=True)
class Evaluation:
    """What came of a Solution. `correctness` has the largest errors, over the outputs' elements,
    `performance` milliseconds; the reference's are 0 where it was not timed."""

    status: str
    hardware: str
    timestamp: str
    libs: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    correctness: Mapping[str, Any] | None = None
    performance: Mapping[str, float] | None = None

    @property
    def latency_us(self) -> float | None:
        """Of one that passed."""
        return None if self.performance is None else 1e3 * self.performance["latency_ms"]

    def to_json(self) -> Json:
        found = self.correctness
        if found is not None:
            found = {n: _text(v) if n in ERRORS else v for n, v in found.items()}
        return {
            "status": self.status,
            "environment": {"hardware": self.hardware, "libs": dict(self.libs)},
            "timestamp": self.timestamp,
            "log": self.log,
            "correctness": found,
            "performance": self.performance and dict(self.performance),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Evaluation":
        """KeyError, TypeError or ValueError where it does not fit."""
        status, found = data["status"], data.get("correctness")
        times = data.get("performance")
        if STATUSES[status] != (found is not None, times is not None):
            raise ValueError(f"{status} with or without correctness, or performance")
        if found is not None:
            found = {**dict.fromkeys(ERRORS, 0.0), **found}
            found |= {name: float(found[name]) for name in ERRORS}
        if times is not None:
            times = {name: float(times.get(name, 0.0)) for name in TIMES}
        where = data["environment"]
        return Evaluation(
            status, where["hardware"], data["timestamp"], where.get("libs", {}),
            data.get("log", ""), found, times,
        )  # fmt: skip


def _text(value: float) -> float | str:
    """As flashinfer-bench spells what JSON has no number for."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity"


@dataclass(frozen=True)
class Trace:
    """A workload of a definition, and of a run of a Solution on it what came of that."""

    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

    @property
    def definition(self) -> str:
        return self.workload.definition

    def to_json(self) -> Json:
        """A line of a set; TraceError for inputs that are only described."""
        for name, spec in self.workload.inputs.items():
            if spec["type"] not in INPUTS:
                raise TraceError(f"{self.definition}: the schema has no {spec['type']} input; "
                                 f"give {name} as a safetensors file")  # fmt: skip
        row = self.workload.to_json()
        return {
            "definition": row["definition"],
            "workload": row["workload"],
            "solution": self.solution,
            "evaluation": self.evaluation and self.evaluation.to_json(),
        }

    @staticmethod
    def from_json(data: Any) -> "Trace":
        """Raises TraceError; unknown fields are dropped."""
        try:
            row = data["workload"]
            inputs = {
                name: {"type": spec["type"], **{k: spec[k] for k in INPUTS[spec["type"]]}}
                for name, spec in row["inputs"].items()
            }
            kept = {"axes": dict(row["axes"]), "inputs": inputs, "uuid": row["uuid"]}
            source = data.get("source", ELSEWHERE)
            workload = Workload.from_json(
                {"definition": data["definition"], "workload": kept, "source": source}
            )
            solution, found = data.get("solution"), data.get("evaluation")
            if (solution is None) != (found is None):
                raise ValueError("a solution without evaluation, or the reverse")
            return Trace(workload, solution, found and Evaluation.from_json(found))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
            raise TraceError(f"no record of FlashInfer Trace: {what}") from None


def read_traces(path: Path) -> list[Trace]:
    """The records of a file, packed or not, or of all files *.jsonl of a folder, by their names."""
    if path.is_dir():
        return [trace for part in sorted(path.rglob("*.jsonl")) for trace in read_traces(part)]
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [Trace.from_json(json.loads(line))] if line.strip() else []
        except ValueError as error:  # not JSON, or not a record
            raise TraceError(f"{path}, line {number}: {error}") from None
    return found


def write_traces(path: Path, traces: Sequence[Trace]) -> None:
    """A file of these records, whole or not at all."""
    write_whole(path, "".join(json.dumps(trace.to_json()) + "\n" for trace in traces))


def root_of(path: Path) -> Path:
    """The set that a workloads file lies in; its own folder where it lies in none."""
    path = path.resolve()
    return next((p.parent for p in path.parents if p.name == "workloads"), path.parent)


def fixed_inputs(definition: Definition, workload: Workload, root: Path) -> Json:
    """The inputs that a workload gives, by name: numbers, and tensors on the CPU from its files.

    Raises TraceError for a file that is missing or leads out of the set, and for tensors of another
    shape or dtype than the definition's.
    """
    shapes = definition.shapes(definition.inputs, definition.bind(workload.axes))
    given: Json = {}
    for name, spec in workload.inputs.items():
        if name not in definition.inputs:
            raise TraceError(f"{definition.name}: a workload gives {name}, which is no input")
        if spec["type"] == "scalar":
            given[name] = spec["value"]
        elif spec["type"] == "safetensors":
            tensor = _loaded(root, spec["path"], spec["tensor_key"])
            want = getattr(torch, definition.inputs[name].dtype), shapes[name]
            if (tensor.dtype, tuple(tensor.shape)) != want:
                raise TraceError(
                    f"{definition.name}: {name} must be {want[0]} {want[1]}, and in "
                    f"{spec['path']} is {tensor.dtype} {tuple(tensor.shape)}"
                )
            given[name] = tensor
    return given


def _loaded(root: Path, path: str, key: str) -> torch.Tensor:
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise TraceError(f"{path} leads out of {root}")
    try:
        with safe_open(place, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{place}: {error}") from None


def stored(
    definition: Definition, workload: Workload, root: Path, given: Mapping[str, torch.Tensor]
) -> Workload:
    """The workload with these tensors given, in a file of the set at `root` that is written where
    it is missing. Scalars are the row's; other tensors are random."""
    path = f"blob/workloads/{definition.op_type}/{definition.name}/{workload.uuid}.safetensors"
    held = {name: tensor.contiguous() for name, tensor in given.items()}
    specs: dict[str, Mapping[str, Any]] = {}
    for name, tensor in definition.inputs.items():
        specs[name] = {"type": "random"} if tensor.shape is not None else workload.inputs[name]
        if name in held:
            specs[name] = {"type": "safetensors", "path": path, "tensor_key": name}
    if held and not (root / path).exists():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        part = root / f"{path}.part"
        save_file(held, part)
        part.rename(root / path)
    return replace(workload, inputs=specs)


def evaluation(outcome: Mapping[str, Any], gpu: Mapping[str, Any]) -> Evaluation:
    """What a worker's outcome says, as a record of the schema. Our clock has a median; there is no
    relative error, and infinity stands for an error that no number tells."""
    status = _OURS.get(outcome["status"], "RUNTIME_ERROR")
    correctness, times = STATUSES[status]
    worst = outcome.get("check", {}).get("max_abs_error")
    error = {"max_relative_error": 0.0, "max_absolute_error": math.inf if worst is None else worst}
    latency = outcome["latency_us"]["median"] / 1e3 if times else 0.0
    return Evaluation(
        status=status,
        hardware=str(gpu.get("name", "unknown")).replace(" ", "_"),
        timestamp=datetime.now(UTC).isoformat(),
        libs={n: str(gpu[n]) for n in ("torch", "driver") if n in gpu},
        log=outcome.get("detail", ""),
        correctness=error if correctness else None,
        performance={**dict.fromkeys(TIMES, 0.0), "latency_ms": latency} if times else None,
    )
