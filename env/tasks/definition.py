"""FlashInfer-Bench definitions: the 46 of ptxflow, its own, and any JSON file of the same schema.

A definition names an operator's axes, inputs and outputs and carries a reference in PyTorch.
Everything wrong with one raises `DefinitionError`, whose message is one line. torch is imported
only when a reference runs.
"""

import ast
import difflib
import functools
import json
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput

FOLDER = Path(__file__).resolve().parent / "definitions"
OWN = FOLDER.with_name("own_definitions")  # of operators that the 46 lack
GEMM = re.compile(r"gemm_n([1-9]\d*)_k([1-9]\d*)")  # names that say their constants
DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "bool",
)  # fmt: skip


class DefinitionError(BadInput):
    """A definition, an axis or a workload that cannot be used; the message is one line."""


@dataclass(frozen=True)
class Axis:
    """A named dimension: `value` where it is constant, None where a workload binds it."""

    value: int | None = None
    description: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As FlashInfer-Bench JSON."""
        kind = {"type": "var"} if self.value is None else {"type": "const", "value": self.value}
        return kind | ({"description": self.description} if self.description else {})


@dataclass(frozen=True)
class Tensor:
    """An input or output: axis names of its shape (None: a scalar) and its element type.

    A caller may give None for an input that is `optional`.
    """

    shape: tuple[str, ...] | None
    dtype: str
    description: str | None = None
    optional: bool = False

    def to_json(self) -> dict[str, Any]:
        """As FlashInfer-Bench JSON, and `optional` where that is so."""
        shape = None if self.shape is None else list(self.shape)
        text = {"description": self.description} if self.description else {}
        missing = {"optional": True} if self.optional else {}
        return {"shape": shape, "dtype": self.dtype} | text | missing


@dataclass(frozen=True)
class Definition:
    """An operator with some axes constant; `source` is the reference as Python text, or empty."""

    name: str
    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    constraints: tuple[str, ...] = ()
    source: str = field(default="", repr=False)
    description: str = field(default="", repr=False)
    tags: tuple[str, ...] = ()

    @property
    def const_axes(self) -> dict[str, int]:
        """The axes that are constant, with their values."""
        return {name: axis.value for name, axis in self.axes.items() if axis.value is not None}

    @property
    def var_axes(self) -> tuple[str, ...]:
        """The axes a workload binds, in the definition's order."""
        return tuple(name for name, axis in self.axes.items() if axis.value is None)

    def bind(self, axes: Mapping[str, Any]) -> dict[str, int]:
        """Every axis of the definition with its value, from values for the variable ones.

        Raises DefinitionError for an axis that is missing, unknown, not a positive integer, or a
        constant given another value, and for axes that break an equality of `constraints`.
        Inequalities are advisory: recorded workloads of this schema break them.
        """
        for name in axes:
            if name not in self.axes:
                known = ", ".join(self.axes)
                raise DefinitionError(f"{self.name}: unknown axis {name!r}; the axes are {known}")
        if missing := [name for name in self.var_axes if name not in axes]:
            raise DefinitionError(f"{self.name}: no value is given for {', '.join(missing)}")
        bound: dict[str, int] = {}
        for name, axis in self.axes.items():
            bound[name] = self._positive(name, axes.get(name, axis.value))
            if axis.value is not None and bound[name] != axis.value:
                raise DefinitionError(
                    f"{self.name}: axis {name!r} is the constant {axis.value}, not {bound[name]}"
                )
        for constraint in self.constraints:
            if not _holds(constraint, bound):
                facts = ", ".join(f"{n}={v}" for n, v in bound.items() if n in constraint)
                raise DefinitionError(f"{self.name}: the axes break {constraint} ({facts})")
        return bound

    def _positive(self, name: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool) or number <= 0:
            raise DefinitionError(
                f"{self.name}: axis {name!r} must be a positive integer, not {value!r}"
            )
        return number

    def shapes(self, tensors: Mapping[str, Tensor], axes: Mapping[str, int]) -> dict[str, Any]:
        """The sizes of each tensor for bound axes; None for a scalar."""
        return {
            name: None if t.shape is None else tuple(axes[a] for a in t.shape)
            for name, t in tensors.items()
        }

    def resized(self, **axes: int) -> "Definition":
        """The same operator with other constants; of its reference those named after an axis (TOPK)
        take that axis's value."""
        values = {n: Axis(axes.get(n, a.value), a.description) for n, a in self.axes.items()}
        source = self.source
        for name, value in axes.items():
            source = re.sub(
                rf"^{name.upper()} = .*$", f"{name.upper()} = {value}", source, flags=re.M
            )
        return replace(self, axes=values, source=source)

    def sized(self, name: str, axes: Mapping[str, int], what: str = "") -> "Definition":
        """The same with other constants, under a name of its own."""
        made = self.resized(**{n: axes[n] for n in self.const_axes})
        about = ", ".join(f"{n} {v}" for n, v in made.const_axes.items())
        return replace(made, name=name, description=f"{what}as {self.name} with {about}")

    def to_json(self) -> dict[str, Any]:
        """The definition as FlashInfer-Bench JSON; `parse` reads it back."""
        data: dict[str, Any] = {"name": self.name, "op_type": self.op_type}
        if self.description:
            data["description"] = self.description
        if self.tags:
            data["tags"] = list(self.tags)
        data["axes"] = {name: axis.to_json() for name, axis in self.axes.items()}
        data["constraints"] = list(self.constraints)
        data["inputs"] = {name: tensor.to_json() for name, tensor in self.inputs.items()}
        data["outputs"] = {name: tensor.to_json() for name, tensor in self.outputs.items()}
        if self.source:
            data["reference"] = self.source
        return data


_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _holds(constraint: str, axes: Mapping[str, int]) -> bool:
    """Whether an equality between axes holds; true for whatever reads more than axes."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in axes:
                return axes[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return int(_ARITHMETIC[type(op)](value(left), value(right)))
        raise LookupError

    match ast.parse(constraint, mode="eval").body:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            try:
                return value(left) == value(right)
            except LookupError:
                return True
    return True


@functools.cache
def _paths(*folders: Path) -> dict[str, Path]:
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*/*.json"))}


def names() -> tuple[str, ...]:
    """The names of the 46 definitions, by op type: those that policies are trained on."""
    return tuple(_paths(FOLDER))


def own_names() -> tuple[str, ...]:
    """The names of ptxflow's own definitions, which no policy was trained on, by op type."""
    return tuple(_paths(OWN))


def load(name: str | os.PathLike[str]) -> Definition:
    """The definition of that name, or the one in that JSON file (a path, or `*.json`). Of
    a GEMM a name may say any constants: `gemm_n11008_k4096`.

    DefinitionError with near names for an unknown one, with line and column where a file is not
    JSON, and with the key that is wrong.
    """
    if not isinstance(name, str | os.PathLike):
        raise DefinitionError(f"a definition is a name or a path, not {name!r}")
    text = os.fspath(name)
    is_path = not isinstance(name, str) or text.endswith(".json") or os.sep in text
    if not is_path:
        if text in (known := _paths(FOLDER, OWN)):
            return _listed(text)
        if said := GEMM.fullmatch(text):
            return load("gemm_n4096_k4096").sized(text, {"N": int(said[1]), "K": int(said[2])})
        near = difflib.get_close_matches(text, known, n=5, cutoff=0.4)
        hint = f"near names: {', '.join(near)}" if near else "no name is near"
        raise DefinitionError(
            f"unknown definition {text!r}; {hint}; the path of a JSON file is taken too"
        )
    return parse(_read(Path(text)), text)


@functools.cache
def _listed(name: str) -> Definition:
    """One that comes with ptxflow; records name the same few thousands of times."""
    return parse(_read(_paths(FOLDER, OWN)[name]), name)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DefinitionError(f"definition file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DefinitionError(f"definition file {path}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise DefinitionError(
            f"definition file {path}: not JSON, line {error.lineno} column {error.colno}: "
            f"{error.msg}"
        ) from None


def parse(data: Any, where: str = "definition") -> Definition:
    """A definition from its JSON value; DefinitionError, named by `where`, if it is wrong."""

    def fail(key: str, expected: str) -> DefinitionError:
        return DefinitionError(f"{where}: {key} must be {expected}")

    if not isinstance(data, dict):
        raise fail("the definition", "a JSON object")
    for key in ("name", "op_type"):
        if not isinstance(data.get(key), str) or not data[key]:
            raise fail(f'"{key}"', "a non-empty string")
    axes = {n: _axis(n, a, fail) for n, a in _object(data, "axes", fail).items()}
    tensors = {
        key: {n: _tensor(n, t, axes, key, fail) for n, t in _object(data, key, fail).items()}
        for key in ("inputs", "outputs")
    }
    shared = set(tensors["inputs"]) & set(tensors["outputs"])
    if shared:
        raise fail('"outputs"', f"named unlike the inputs; both have {', '.join(sorted(shared))}")
    constraints = _strings(data, "constraints", fail)
    for constraint in constraints:
        try:
            ast.parse(constraint, mode="eval")
        except SyntaxError:
            raise fail('"constraints"', f"Python expressions, not {constraint!r}") from None
    return Definition(
        name=data["name"],
        op_type=data["op_type"],
        axes=axes,
        inputs=tensors["inputs"],
        outputs=tensors["outputs"],
        constraints=constraints,
        source=_reference(data, fail),
        description=data.get("description") or "",
        tags=_strings(data, "tags", fail),
    )


Fail = Callable[[str, str], DefinitionError]


def _object(data: Mapping[str, Any], key: str, fail: Fail) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict) or not value:
        what = "axis name to axis" if key == "axes" else "tensor name to shape and dtype"
        raise fail(f'"{key}"', f"a non-empty object of {what}")
    return value


def _strings(data: Mapping[str, Any], key: str, fail: Fail) -> tuple[str, ...]:
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(s, str) and s.strip() for s in value):
        raise fail(f'"{key}"', "a list of non-empty strings")
    return tuple(value)


def _axis(name: str, data: Any, fail: Fail) -> Axis:
    match data:
        case {"type": "var"}:
            return Axis(None, data.get("description"))
        case {"type": "const", "value": int(value)} if value > 0 and not isinstance(value, bool):
            return Axis(value, data.get("description"))
    raise fail(f'axis "{name}"', '{"type": "var"} or {"type": "const", "value": a positive int}')


def _tensor(name: str, data: Any, axes: Mapping[str, Axis], key: str, fail: Fail) -> Tensor:
    where = f'{key[:-1]} "{name}"'
    if not isinstance(data, dict) or "shape" not in data or "dtype" not in data:
        raise fail(where, 'an object with "shape" and "dtype"')
    shape, dtype = data["shape"], data["dtype"]
    if dtype not in DTYPES:
        raise fail(f"dtype of {where}", f"one of {', '.join(DTYPES)}, not {dtype!r}")
    optional = data.get("optional", False)
    if not isinstance(optional, bool) or (optional and key == "outputs"):
        raise fail(f'"optional" of {where}', "true or false, and of an input")
    if shape is None:
        return Tensor(None, dtype, data.get("description"), optional)
    if not isinstance(shape, list) or not all(isinstance(axis, str) for axis in shape):
        raise fail(f"shape of {where}", "a list of axis names, or null for a scalar")
    for axis in shape:
        if axis not in axes:
            raise fail(f"shape of {where}", f"made of axes ({', '.join(axes)}), not {axis!r}")
    return Tensor(tuple(shape), dtype, data.get("description"), optional)


def _reference(data: Mapping[str, Any], fail: Fail) -> str:
    source = data.get("reference") or ""
    if not source:
        return ""
    try:
        body = ast.parse(source).body
    except (SyntaxError, TypeError, ValueError):
        raise fail('"reference"', "Python source text") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
        raise fail('"reference"', "Python source with a top-level function run")
    return str(source)
