"""FlashInfer-Bench Solutions: raw PTX and the Python that launches it, in one JSON file.

The Solution runs by itself: its main.py needs PyTorch and an NVIDIA driver. The driver translates
the PTX, because that keeps setmaxnreg, which the linking APIs drop.
`check` runs one against the reference, on this machine's GPU:

    ptxflow solution check out/NAME/solution.json --axes M=1,1024
"""

from __future__ import annotations

import argparse
import ast
import json
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptxflow import __version__
from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.backend.runtime import RuntimeUnavailable, gpu_info
from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.launch import (
    RANDOM_STEP,
    InputParam,
    Launch,
    Param,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
)
from ptxflow.env.tasks.arguments import parse_axes, positive_int, product
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.disagreement import named
from ptxflow.eval.bench.worker import Worker, WorkerError

START, END = "# ---- copied from here ----\n", "# ---- copied to here ----\n"
ENTRY_POINT = "main.py::run"
AUTHOR = "ptxflow"
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
_C_TYPES = {"float32": "float", "int32": "int32"}
FIELDS = ("name", "definition", "author", "spec", "sources")


class SolutionError(BadInput):
    """A Solution that cannot be made or read; one line."""


def solution(
    definition: Definition, device: Device, launch: Launch, ptx: str, key: str, description: str
) -> dict[str, Any]:
    """The Solution of a compiled kernel as JSON data; `key` is its strategy's."""
    return {
        "name": f"ptxflow_{definition.name}_{device.name}_{key}",
        "definition": definition.name,
        "author": AUTHOR,
        "description": description,
        "spec": {
            "language": "python",
            "target_hardware": [
                f"NVIDIA_{d.name.upper()}" for d in DEVICES.values() if d.arch == device.arch
            ],
            "entry_point": ENTRY_POINT,
            "dependencies": ["torch"],
            "destination_passing_style": False,
        },
        "sources": [
            {"path": "main.py", "content": main_source(definition, device, launch, key)},
            {"path": "kernel.ptx", "content": ptx},
        ],
    }


def main_source(definition: Definition, device: Device, launch: Launch, key: str) -> str:
    """The text of main.py: this kernel's launch, and the launcher that every Solution shares."""
    _check_names(definition, launch)
    text = (Path(__file__).parent / "standalone.py").read_text()
    launcher = text.partition(START)[2].partition(END)[0].strip()
    inputs, outputs = (", ".join(t) for t in (definition.inputs, definition.outputs))
    expected = "\n".join(_expectations(definition, launch))
    made = "\n".join(
        f"    {n} = torch.empty({_shape(t.shape or ())}, dtype=torch.{t.dtype}, "
        f"device={next(iter(definition.inputs))}.device)"
        for n, t in definition.outputs.items()
    )
    spaces = [w.name for w in launch.workspace]
    places = "\n".join(_place(step, spaces) for step in launch.steps)
    space = "".join(f"    {w.name} = Workspace({w.bytes})\n" for w in launch.workspace)
    steps = "\n".join(
        f"    {(s.entry, s.block, tuple(s.cluster), s.smem_bytes, s.dependent)!r},"
        for s in launch.steps
    )
    draws = any(isinstance(p, RandomParam) for step in launch.steps for p in step.params)
    return f'''"""{definition.name} for {device.arch}: launches the kernel in kernel.ptx.

Made by ptxflow {__version__}; strategy {key}.
"""

{launcher}

STEPS = (
{steps}
)
CAPABILITY = {CAPABILITY[device.arch]!r}
RANDOM_STEP = {RANDOM_STEP if draws else 0}


def geometry({inputs}, {outputs}):
    """Workspaces, and grid and parameters of each launch, for these tensors."""
{_axis_lines(definition, launch, f"{space} {places}")}
{space}    return [{", ".join(spaces)}], [
{places}
    ]


def run({inputs}):
    """Returns {outputs}; see {definition.name} for shapes and types."""
{_axis_lines(definition, launch, f"{expected} {made}")}
{expected}
{made}
    launch(geometry, ({inputs}, {outputs}))
    return {outputs}
'''


def _place(step: Launch, spaces: Sequence[str]) -> str:
    """Grid and parameters of a launch, as a pair."""
    parameters = "\n".join(f"            {_parameter(p, spaces)}," for p in step.params)
    return f"        (({', '.join(step.grid)}), [\n{parameters}\n        ]),"


def _expectations(definition: Definition, launch: Launch) -> list[str]:
    """A line for each input tensor; those that a caller may leave out are checked where given."""
    optional, lines = _optional(launch), []
    for name, t in definition.inputs.items():
        if t.shape is not None:
            check = f'expect("{name}", {name}, torch.{t.dtype}, {_shape(t.shape)})'
            lines.append(f"    {f'{name} is None or ' if name in optional else ''}{check}")
    return lines


def _optional(launch: Launch) -> set[str]:
    """The input tensors that the kernel does without."""
    params = [p for step in launch.steps for p in step.params]
    return {p.tensor for p in params if isinstance(p, PresentParam)}


def _shape(axes: Sequence[str]) -> str:
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def _axis_lines(definition: Definition, launch: Launch, used_in: str) -> str:
    """Assignments of the axes used in a text. Variable ones come from an input that must be given,
    or from an equality with an axis of one."""
    lines = []
    used, optional = set(re.findall(r"\w+", used_in)), _optional(launch)
    needed = [name for name in definition.inputs if name not in optional]
    for name in filter(used.__contains__, definition.var_axes):
        found = _axis(definition, needed, name) or _equal(definition, needed, name)
        if found is None:
            raise SolutionError(f"{definition.name}: no input that must be given has axis {name}")
        lines.append(f"    {name} = {found}")
    constants = {n: v for n, v in definition.const_axes.items() if n in used}
    if constants:
        left = ", ".join(constants)
        lines.append(f"    {left} = {', '.join(map(str, constants.values()))}")
    return "\n".join(lines)


def _axis(definition: Definition, inputs: Sequence[str], name: str) -> str | None:
    """The size of an axis, from the first of the inputs that has it."""
    for tensor in inputs:
        shape = definition.inputs[tensor].shape or ()
        if name in shape:
            return f'axis("{tensor}", {tensor}, {len(shape)}, {shape.index(name)})'
    return None


def _equal(definition: Definition, inputs: Sequence[str], name: str) -> str | None:
    """The size of an axis from a constraint `other == axis + number`."""
    for constraint in definition.constraints:
        match ast.parse(constraint, mode="eval").body:
            case ast.Compare(
                left=ast.Name(id=other),
                ops=[ast.Eq()],
                comparators=[ast.BinOp(ast.Name(id=own), ast.Add(), ast.Constant(value=int(more)))],
            ) if own == name and (found := _axis(definition, inputs, other)):
                return f"{found} - {more}"
    return None


def _parameter(param: Param, spaces: Sequence[str]) -> str:
    match param:
        case TensorMapParam():
            own = param.tensor in spaces
            if own and param.dtype != "uint8":
                raise SolutionError(f"{param.tensor}: a workspace is mapped as bytes")
            call = f"{param.tensor}.map(" if own else f"tensor_map({param.tensor}, "
            return (
                f"{call}dims={_shape(param.dims)}, "
                f"strides={_shape(param.strides)}, box={tuple(param.box)!r}, "
                f"swizzle={param.swizzle}, l2_promotion={param.l2_promotion})"
            )
        case PointerParam():
            return f"{param.tensor}.place" if param.tensor in spaces else f"pointer({param.tensor})"
        case ScalarParam():
            return f"scalar({param.value})"
        case PresentParam():
            return f"scalar({param.tensor} is not None)"
        case InputParam():
            return f"given({param.name}, ctypes.c_{_C_TYPES[param.dtype]})"
        case RandomParam():
            return f"random({param.word})"


def _check_names(definition: Definition, launch: Launch) -> None:
    """Axes, tensors and workspaces become Python names in main.py: they must be names, and all
    different."""
    spaces = [w.name for w in launch.workspace]
    names = [*definition.axes, *definition.inputs, *definition.outputs, *spaces]
    reserved = {"torch", "ctypes", "Path", "grid", "geometry", "run", "launch", "axis", "expect"}
    reserved |= {"STEPS", "tensor_map", "pointer", "scalar", "given", "random", "min", "max"}
    reserved |= {"Workspace", "encode"}
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in reserved:
            raise SolutionError(f"{definition.name}: {name!r} cannot be a name in Python code")
        if names.count(name) > 1:
            raise SolutionError(f"{definition.name}: {name!r} names more than one thing")


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
