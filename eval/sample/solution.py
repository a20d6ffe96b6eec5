"""FlashInfer-Bench Solutions: a kernel library and the runtime that calls it, in one JSON file.

A Solution runs by itself: it needs PyTorch, NumPy and an NVIDIA driver. Its sources are main.py,
the modules of `ptxflow.load` as they stand but for their imports, and the library, with cubins as
base64.
`check` runs one against the reference, on this machine's GPU:

    ptxflow solution check out/NAME/solution.json --axes M=1,1024
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import json
import re
import sys
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
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.disagreement import named
from ptxflow.eval.bench.worker import Worker, WorkerError

ENTRY_POINT = "main.py::run"
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
    """{inputs} in this order or by name, and behind them, where
    the caller has memory for them, the outputs; returns {outputs}.
    """
    loaded = kernel()
    count = len(loaded.signature.inputs)
    return loaded(*args[:count], out=args[count:] or None, **named)
'''


class SolutionError(BadInput):
    """A Solution that cannot be made or read; one line."""


def solution(manifest: Manifest, files: Mapping[str, bytes], description: str) -> dict[str, Any]:
    """The Solution of a library as JSON data; `files` are its members' by name."""
    data = json.dumps(manifest.to_json(), indent=1)
    key = hashlib.sha256(data.encode()).hexdigest()[:16]
    if len(manifest.members) == 1:
        key = manifest.members[0].key
    name = f"ptxflow_{manifest.name}_{manifest.target.name}_{key}"
    texts = {"main.py": _main(manifest, name), **runtime(), MANIFEST: data}
    for m in manifest.members:
        texts[m.cubin.name + TEXT] = base64.b64encode(files[m.cubin.name]).decode()
        texts[m.ptx.name] = files[m.ptx.name].decode()
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
            "entry_point": ENTRY_POINT,
            "dependencies": ["torch", "numpy"],
            "destination_passing_style": True,
        },
        "sources": [{"path": path, "content": text} for path, text in texts.items()],
    }


def _main(manifest: Manifest, name: str) -> str:
    digest = hashlib.sha256(json.dumps(runtime()).encode()).hexdigest()[:12]
    keys = ", ".join(m.key for m in manifest.members)
    ranges = ", ".join(f"{n} {low} to {high}" for n, (low, high) in manifest.ranges.items())
    about = f"Strategies {keys}; {ranges or 'any sizes'}."
    sides = [list(manifest.definition[side]) for side in ("inputs", "outputs")]
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


def check_file(args: argparse.Namespace) -> int:
    """Run a Solution against the reference in a child process; prints one line per axes."""
    data = read_solution(args.file)
    definition = load(args.definition or data["definition"])
    gpu_info()
    rows = [definition.bind(axes) for axes in product(parse_axes(args.axes))]
    worker, right = Worker(), 0
    try:
        for bound in rows:
            axes = {name: bound[name] for name in definition.var_axes}
            job = {
                "definition": definition.to_json(), "axes": axes, "solution": data,
                "seeds": list(range(1, args.seeds + 1)), "rounds": 20, "settle": 0.5,
            }  # fmt: skip
            outcome = worker.run(job, args.timeout)
            right += outcome["status"] == "ok"
            line = outcome["status"] + (f": {outcome['detail']}" if outcome.get("detail") else "")
            if outcome["status"] == "ok":
                us = outcome["latency_us"]["median"]
                differ = outcome["timing"].get("disagree", {})
                beside = [
                    f", {peer / us:.2f} of {named(name, differ)}"
                    for name, peer in outcome["peers"].items()
                ]
                line += f", {us:.1f} us" + "".join(beside)
            print(f"{data['name']} {' '.join(f'{n}={v}' for n, v in axes.items())}: {line}")
    finally:
        worker.stop()
    return 0 if right == len(rows) else 1


@reports("solution", RuntimeUnavailable, WorkerError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow solution", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="check")
    check = commands.add_parser("check", help="run a Solution on the GPU against the reference")
    check.add_argument("file", type=Path, help="the Solution's JSON file")
    check.add_argument("--definition", metavar="NAME|PATH", help="default: the one it names")
    check.add_argument("--axes", nargs="+", default=["M=1,17,128,1000,4096"], metavar="M=1,17")
    check.add_argument("--seeds", type=positive_int, default=3, help="fresh inputs (default: 3)")
    check.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    return check_file(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
