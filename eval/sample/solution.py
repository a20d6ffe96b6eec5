"""FlashInfer-Bench Solutions: a kernel library and the runtime that calls it, in one JSON file.

A Solution runs by itself: it needs PyTorch, NumPy and an NVIDIA driver. Its sources are main.py,
the modules of `ptxflow.load` as they stand but for their imports, and the library, with cubins as
base64.
`check` runs one against the reference, on this machine's GPU:

    ptxflow solution check out/NAME/solution.json --axes M=1,1024
"""

import argparse
import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptxflow import __version__
from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.backend.runtime import RuntimeUnavailable, gpu_info
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.library.manifest import MANIFEST, TEXT, Manifest
from ptxflow.env.tasks.arguments import parse_axes, positive_int, product
from ptxflow.env.tasks.definition import Definition, load, parse
from ptxflow.eval.bench.disagreement import named
from ptxflow.eval.bench.trace_set import (
    Trace,
    evaluation,
    fixed_inputs,
    read_traces,
    root_of,
    write_traces,
)
from ptxflow.eval.bench.worker import Worker, WorkerError

ENTRY = "main.py"
AUTHOR = "ptxflow"
FIELDS = ("name", "definition", "author", "spec", "sources")
LOADER = "ptxflow.compiler.library.call"
_IMPORT = re.compile(r"^from (ptxflow\.compiler\.[\w.]+) import", re.M)
_MAIN = '''"""{name}.

{about}
Made by ptxflow {version}.
"""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
RUNTIME = "ptxflow_{digest}"  # the modules beside this file; one copy serves a process
sys.modules.setdefault(RUNTIME, ModuleType(RUNTIME)).__path__ = [str(FOLDER)]
library_call = importlib.import_module(f"{{RUNTIME}}.library_call")


@functools.cache
def kernel():
    """The kernels in this folder, for the GPU."""
    return library_call.load(FOLDER)


def run(*args, **named):
    """{inputs} in this order or by name, and behind them or by
    name, where the caller has memory for them, {outputs}; returns these.
    """
    loaded = kernel()
    if not named:
        return loaded(*args)
    made = [named.pop(a.name) for a in loaded.signature.outputs if a.name in named]
    count = len(loaded.signature.inputs)
    return loaded(*args[:count], out=made or args[count:] or None, **named)
'''


class SolutionError(BadInput):
    """A Solution that cannot be made or read; one line."""


def solution(manifest: Manifest, files: Mapping[str, bytes], description: str) -> dict[str, Any]:
    """The Solution of a library as JSON data; `files` are its members' by name."""
    key = hashlib.sha256(_text(manifest).encode()).hexdigest()[:16]
    if len(manifest.members) == 1:
        key = manifest.members[0].key
    name = f"ptxflow_{manifest.name}_{manifest.target.name}_{key}"
    sources = texts(manifest, name)
    for m in manifest.members:
        sources[m.cubin.name + TEXT] = base64.b64encode(files[m.cubin.name]).decode()
        sources[m.ptx.name] = files[m.ptx.name].decode()
    return {
        "name": name,
        "definition": manifest.name,
        "author": AUTHOR,
        "description": description,
        "spec": {
            "language": "python",
            "target_hardware": [
                f"NVIDIA_{d.name.upper()}"
                for d in DEVICES.values()
                if d.arch == manifest.target.arch
            ],
            "entry_point": f"{ENTRY}::run",
            "dependencies": ["torch", "numpy"],
            "destination_passing_style": True,
        },
        "sources": [{"path": path, "content": text} for path, text in sources.items()],
    }


def _text(manifest: Manifest) -> str:
    return json.dumps(manifest.to_json(), indent=1)


def texts(manifest: Manifest, name: str) -> dict[str, str]:
    """What stands beside the members' files, by path: main.py, the runtime, the manifest."""
    return {ENTRY: _main(manifest, name), **runtime(), MANIFEST: _text(manifest)}


def _main(manifest: Manifest, name: str) -> str:
    digest = hashlib.sha256(json.dumps(runtime()).encode()).hexdigest()[:12]
    keys = ", ".join(m.key for m in manifest.members)
    ranges = ", ".join(f"{n} {low} to {high}" for n, (low, high) in manifest.ranges.items())
    about = f"Strategies {keys}; {ranges or 'any sizes'}."
    given = parse(manifest.definition, "the library's definition")
    sides = [*given.inputs], [*given.outputs]
    for word in (manifest.name, *sides[0], *sides[1]):
        if not re.fullmatch(r"[\w.-]+", word):
            raise SolutionError(f"{word!r} cannot be a name in a Solution: letters, digits, _ . -")
    inputs, outputs = (", ".join(names) for names in sides)
    return _MAIN.format(
        name=name, about=about, version=__version__, digest=digest, inputs=inputs, outputs=outputs
    )


@functools.cache
def runtime() -> dict[str, str]:
    """What loads and calls a library, by file name: modules that import each other from one
    folder."""
    files, todo = dict[str, str](), [LOADER]
    while todo:
        module = todo.pop()
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        files[f"{_flat(module)}.py"] = _IMPORT.sub(lambda m: f"from .{_flat(m[1])} import", text)
        todo += [m for m in _IMPORT.findall(text) if f"{_flat(m)}.py" not in files]
        if (source := Path(spec.origin).with_name("launcher.c")).exists():
            files[source.name] = source.read_text(encoding="utf-8")
    return files


def _flat(module: str) -> str:
    """`ptxflow.compiler.library.plan` is `library_plan`."""
    return module.removeprefix("ptxflow.compiler.").replace(".", "_")


# Reading and running one -------------------------------------------------------------------------


def read_solution(path: Path) -> dict[str, Any]:
    """A Solution file whose structure holds; SolutionError, one line, otherwise."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SolutionError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SolutionError(f"{path} is not JSON: {error}") from None
    missing = [f for f in FIELDS if not isinstance(data, dict) or f not in data]
    if missing:
        raise SolutionError(f"{path}: a Solution needs {', '.join(missing)}")
    if data["spec"].get("language") != "python":
        raise SolutionError(f"{path}: only Solutions in python can be run here")
    entry = data["spec"].get("entry_point", "").partition("::")[0]
    if entry not in {source.get("path") for source in data["sources"]}:
        raise SolutionError(f"{path}: no source file {entry!r}, which the entry point names")
    for source in data["sources"]:
        place = Path(source["path"])
        if place.is_absolute() or ".." in place.parts:
            raise SolutionError(f"{path}: source path {source['path']!r} leads out of its folder")
    return data  # type: ignore[no-any-return]


def rows_of(definition: Definition, args: argparse.Namespace) -> list[Mapping[str, Any]]:
    """What to run at, as parts of a job: a workload each of --workloads, else of --axes."""
    if args.workloads is None:
        rows = [definition.bind(axes) for axes in product(parse_axes(args.axes))]
        return [{"axes": {n: bound[n] for n in definition.var_axes}} for bound in rows]
    root = root_of(args.workloads)
    own = [t for t in read_traces(args.workloads) if t.definition == definition.name]
    if not own:
        raise SolutionError(f"{args.workloads}: no workload of {definition.name}")
    for trace in own:
        fixed_inputs(definition, trace.workload, root)  # refused here, and not by the worker
    return [{"axes": dict(t.workload.axes), "workload": t.to_json() | {"solution": None,
             "evaluation": None}, "root": str(root)} for t in own]  # fmt: skip


def check_file(args: argparse.Namespace) -> int:
    """Run a Solution against the reference in a child process; prints one line per workload."""
    data = read_solution(args.file)
    definition = load(args.definition or data["definition"])
    beside = [read_solution(path) for path in args.beside]
    rows = rows_of(definition, args)
    gpu_info()
    worker, traces = Worker(), list[Trace]()
    outcomes = []
    try:
        for row in rows:
            job = {
                "definition": definition.to_json(), **row, "solution": data, "beside": beside,
                "seeds": list(range(1, args.seeds + 1)), "rounds": 20, "settle": 0.5,
            }  # fmt: skip
            outcomes.append(outcome := worker.run(job, args.timeout))
            sizes = " ".join(f"{n}={v}" for n, v in row["axes"].items())
            print(f"{data['name']} {sizes}: {_line(outcome)}")
            if "workload" in row:
                workload = Trace.from_json(row["workload"]).workload
                traces.append(Trace(workload, data["name"], evaluation(outcome, worker.gpu)))
        if args.traces is not None:
            write_traces(args.traces, traces)
    finally:
        worker.stop()
    return 0 if all(outcome["status"] == "ok" for outcome in outcomes) else 1


def _line(outcome: Mapping[str, Any]) -> str:
    """The status of an outcome, and where it is right the times."""
    line = outcome["status"] + (f": {outcome['detail']}" if outcome.get("detail") else "")
    if outcome["status"] != "ok":
        return line
    us, timing = outcome["latency_us"]["median"], outcome["timing"]
    differ = timing.get("disagree", {})
    line += f", {us:.1f} us"
    line += "".join(f", {t / us:.2f} of {named(n, differ)}" for n, t in outcome["peers"].items())
    absent = timing.get("absent", {}).items()
    return line + "".join(f"; {n} {why}" for n, why in absent if why.startswith("wrong"))


@reports("solution", RuntimeUnavailable, WorkerError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow solution", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="check")
    check = commands.add_parser("check", help="run a Solution on the GPU against the reference")
    check.add_argument("file", type=Path, help="the Solution's JSON file")
    check.add_argument("--definition", metavar="NAME|PATH", help="default: the one it names")
    check.add_argument("--axes", nargs="+", default=["M=1,17,128,1000,4096"], metavar="M=1,17")
    files: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    check.add_argument("--workloads", **files, help="rows of FlashInfer Trace, with their files, "
                       "instead of --axes")  # fmt: skip
    check.add_argument("--traces", **files, help="of --workloads: write what came of them as "
                       "FlashInfer Trace")  # fmt: skip
    check.add_argument("--beside", **files, nargs="+", default=[], help="other Solutions to time: "
                       "Python of other people, which is run here")  # fmt: skip
    check.add_argument("--seeds", type=positive_int, default=3, help="fresh inputs (default: 3)")
    check.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    args = parser.parse_args(argv)
    if args.traces is not None and args.workloads is None:
        parser.error("--traces are of --workloads, and none are given")
    return check_file(args)
