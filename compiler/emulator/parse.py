"""PTX text to a `Module`: one entry of it with parameters, directives, registers and instructions.

Registers are resolved to slots and labels to instruction indices, both by lexical scope, so that
the machine never sees a name. Anything that is not understood is an error with its line.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ptxflow.compiler.emulator import functions
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from ptxflow.compiler.emulator.literals import number

WIDTHS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}
_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_ENTRY = re.compile(rf"(?:\.visible\s+)?\.entry\s+({_NAME})\s*\(")
_PARAM = re.compile(
    rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.global\s+)?(?:\.align\s+\d+\s+)?)?"
    rf"({_NAME})(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    rf"\.(?:shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})(\[(\d*)\])?$"
)
_REGISTER = re.compile(rf"({_NAME})(?:<(\d+)>)?$")
_SPECIAL = re.compile(r"%[a-z_]+(\.[xyzw])?$")
_OPENS, _INK = re.compile(r"[\[({]"), re.compile(r"\S")
_IGNORED = (".loc", ".file", ".pragma")  # directives
MOST = 1 << 18  # registers, or instructions: more is no kernel


@dataclass(frozen=True)
class Register:
    """A register: its slot in a warp's register file, and its width in bits (1: predicate).

    `param`: a scalar that a call passes in parameter space.
    """

    slot: int
    width: int
    name: str
    negated: bool = False
    param: bool = False


@dataclass(frozen=True)
class Immediate:
    value: int


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A parameter, a shared variable or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    items: tuple["Operand", ...]


@dataclass(frozen=True)
class Pair:
    """`a|b`."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Sink:
    """`_`: a result that nobody wants."""


@dataclass(frozen=True)
class Address:
    """`[base+offset]` or `[base, {coordinates}]`."""

    base: "Operand"
    offset: int = 0
    coordinates: Vector | None = None


Operand = Register | Immediate | Special | Symbol | Vector | Pair | Sink | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction; `targets` are the indices that its labels name, for a branch."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str
    targets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """`kind` is its type, or that of its elements; `elements` is 0 for a scalar."""

    name: str
    bytes: int
    align: int
    kind: str = ""
    elements: int = 0


@dataclass(frozen=True)
class Variable:
    """Of shared or local memory; `bytes` is 0 for the dynamic one."""

    name: str
    bytes: int
    align: int


@dataclass
class Module:
    """One kernel of a PTX text."""

    target: str = ""
    entry: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)


@lru_cache(maxsize=8)
def parse(text: str, entry: str = "") -> Module:
    """The kernel of that name in a PTX text, by default the only one; not to be changed.

    Raises PtxSyntaxError with the line.
    """
    parser = _Parser(text, entry)
    try:
        return parser.module()
    except RecursionError:
        raise parser._fail("nested too deeply") from None


def split(text: str, separator: str = ",") -> list[str]:
    """`text` cut at separators outside brackets and braces."""
    if not _OPENS.search(text):
        parts = [part.strip() for part in text.split(separator)]
        return parts if any(parts) or len(parts) > 1 else []
    out, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == separator and not depth:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*out, tail] if tail or out else []


class _Scope:
    def __init__(self, outer: "_Scope | None"):
        self.outer = outer
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope and name not in scope.registers:
            scope = scope.outer
        return scope.registers[name] if scope else None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope and name not in scope.labels:
            scope = scope.outer
        return scope.labels[name] if scope else None


class _Parser:
    def __init__(self, text: str, entry: str):
        self.entry = entry
        blank = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
        self.text = blank.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        self.at, self.out = 0, Module()
        self.branches: list[tuple[int, _Scope, str]] = []
        self.tables: dict[tuple[int, str], list[tuple[_Scope, str]]] = {}  # of brx.idx
        self.functions = functions.functions(self.text)
        self.calls: list[str] = []  # the functions whose bodies are being put in
        self.returns: list[int] = []  # instructions that leave the innermost of them
        self.labelled = ""
        self.real = "<f"  # the type of decimal fractions, by the instruction

    def module(self) -> Module:
        while self._skip_space():
            if _ENTRY.match(self.text, self.at):
                self._entry()
            elif head := functions.HEAD.match(self.text, self.at):
                self.at = head.end() - 1
                if head[2] == ";":
                    self.at += 1
                else:
                    self._pass_over()
            else:
                self._top_level()
        if not self.out.entry:
            raise PtxSyntaxError(f"the text holds no .entry {self.entry}".rstrip())
        return self.out

    # -- reading ------------------------------------------------------------------------------

    def _skip_space(self) -> bool:
        found = _INK.search(self.text, self.at)
        self.at = found.start() if found else len(self.text)
        return found is not None

    def _line(self) -> int:
        return bisect_left(self.newlines, self.at) + 1

    def _fail(self, what: str, line: int = 0) -> PtxSyntaxError:
        return PtxSyntaxError(f"line {line or self._line()}: {what}")

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise self._fail(f"no {end!r} after {self.text[self.at : self.at + 40]!r}")
        out, self.at = self.text[self.at : stop], stop + len(end)
        return " ".join(out.split())

    def _top_level(self) -> None:
        end = self.text.find("\n", self.at)
        line = self._until(";" if ";" in self.text[self.at : end if end >= 0 else None] else "\n")
        head = line.split()[0]
        if head == ".target":
            self.out.target = [*line.replace(",", " ").split(), ""][1]
        elif head in (".global", ".const"):
            pass  # constants of assertions; a use of one is an unknown symbol
        elif head == ".section":  # debug information
            self.at = len(self.text)
        elif ".shared" in line:
            line = line.replace(".extern ", "").replace(".visible ", "")
            self.out.shared.append(self._variable(line))
        elif head not in (".version", ".address_size", *_IGNORED):
            raise self._fail(f"unknown directive {line!r}")

    def _size(self, kind: str) -> int:
        """Bytes of a type that memory holds."""
        if kind not in WIDTHS or WIDTHS[kind] < 8:
            raise self._fail(f"unknown type .{kind}")
        return WIDTHS[kind] // 8

    def _variable(self, declaration: str) -> Variable:
        match = _VARIABLE.match(declaration)
        if not match:
            raise self._fail(f"unknown declaration {declaration!r}")
        align, kind, name, array, count = match.groups()
        size, elements = self._size(kind), int(count) if count else (0 if array else 1)
        return Variable(name, size * elements, max(int(align or size), 1))

    def _entry(self) -> None:
        match = _ENTRY.match(self.text, self.at)
        assert match
        if self.entry and match[1] != self.entry:
            self._pass_over()
            return
        if self.out.entry:
            raise self._fail("a second .entry")
        self.out.entry, self.at = match[1], match.end()
        for declared in split(self._until(")")):
            self._parameter(declared)
        for directive in re.findall(r"\.(\w+)([^.{]*)", self._until("{")):
            values = tuple(int(v) for v in re.findall(r"\d+", directive[1]))
            self.out.directives[directive[0]] = values
        self._body(_Scope(None))
        self._resolve()

    def _pass_over(self) -> None:
        """What begins here is another kernel, or a function."""
        self._until("{")
        depth = 1
        while depth:
            found = re.compile("[{}]").search(self.text, self.at)
            if found is None:
                raise self._fail("the body does not end")
            depth, self.at = depth + (1 if found[0] == "{" else -1), found.end()

    def _parameter(self, declared: str) -> None:
        match = _PARAM.match(declared)
        if not match:
            raise self._fail(f"unknown parameter {declared!r}")
        align, kind, name, count = match.groups()
        size, elements = self._size(kind), int(count or 0)
        made = Parameter(name, size * (elements or 1), max(int(align or size), 1), kind, elements)
        self.out.parameters.append(made)

    # -- the body -----------------------------------------------------------------------------

    def _body(self, scope: _Scope) -> None:
        while True:
            if not self._skip_space():
                raise self._fail("the body does not end")
            char = self.text[self.at]
            if char in "{}":
                self.at += 1
                inside = _Scope(scope) if char == "{" else scope.outer
                if inside is None:
                    break
                scope = inside
                continue
            label = _LABEL.match(self.text, self.at)
            if label:
                self.labelled = label[1]
                if label[1] in scope.labels:
                    raise self._fail(f"label {label[1]} is defined twice")
                scope.labels[label[1]] = len(self.out.code)
                self.at = label.end()
                continue
            self._statement(scope)

    def _resolve(self) -> None:
        for index, scope, name in self.branches:
            old = self.out.code[index]
            names = self.tables.get((id(scope), name), [(scope, name)])
            found = [s.label(n) for s, n in names]
            targets = tuple(t for t in found if t is not None)
            if len(targets) < len(found):
                raise self._fail(f"no label {name!r}", old.line)
            self.out.code[index] = replace(old, targets=targets)

    def _statement(self, scope: _Scope) -> None:
        line = self._line()
        if self.text[self.at : self.at + 8].split()[0] in _IGNORED:
            self._until("\n")
            return
        text = self._until(";")
        if text.startswith(".branchtargets"):
            targets = [(scope, name) for name in split(text.removeprefix(".branchtargets"))]
            self.tables[id(scope), self.labelled] = targets
        elif text.startswith(".reg"):
            self._registers(text, scope, line)
        elif text.startswith(".param"):
            kind, name = functions.formal(text, line)
            self._register(name, WIDTHS.get(kind), scope, line, param=True)
        elif text.startswith(".shared") and not self.calls:
            self.out.shared.append(self._variable(text))
        elif text.startswith(".local"):
            held = self._variable(text)
            if held not in self.out.local:  # a function that is called twice has one
                self.out.local.append(held)
        elif text.startswith("."):
            raise self._fail(f"unknown directive {text!r}", line)
        else:
            self._instruction(text, scope, line)

    def _registers(self, text: str, scope: _Scope, line: int) -> None:
        _, kind, names = (*text.split(None, 2), "", "")[:3]
        width = WIDTHS.get(kind[1:])
        for declared in split(names):
            match = _REGISTER.match(declared)
            if not match or len(match[2] or "") > 9:
                raise self._fail(f"unknown register {declared!r}", line)
            name, count = match.groups()
            if len(self.out.registers) + int(count or 1) > MOST:
                raise self._fail(f"more than {MOST} registers", line)
            for full in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self._register(full, width, scope, line)

    def _register(
        self, name: str, width: int | None, scope: _Scope, line: int, param: bool = False
    ) -> None:
        if width is None:
            raise self._fail(f"unknown type of {name}", line)
        register = Register(len(self.out.registers), width, name, param=param)
        self.out.registers.append(register)
        scope.registers[name] = register

    def _call(self, tail: str, guard: Register | None, scope: _Scope, line: int) -> None:
        """The function's body, here; its formal parameters are the registers that are passed."""
        parts = split(tail) or [""]
        results = parts.pop(0) if parts[0].startswith("(") else "()"
        name, given = parts[0], parts[1] if len(parts) > 1 else "()"
        function = self.functions.get(name)
        if function is None or len(parts) > 2:
            raise self._fail(f"unknown instruction `call {tail}`: no body of {name!r}", line)
        if name in self.calls:
            raise self._fail(f"{name!r} calls itself", line)
        inner, formals = _Scope(None), (*function.results, *function.parameters)
        passed = [*split(results[1:-1]), *split(given[1:-1])]
        if len(formals) != len(passed):
            raise self._fail(f"{name!r} takes {len(formals)} parameters, not {len(passed)}", line)
        for (kind, formal), actual in zip(formals, passed, strict=True):
            held = scope.register(actual)
            if held is None or held.width != WIDTHS.get(kind):
                raise self._fail(f"{actual!r} is no .param .{kind} to pass to {name!r}", line)
            inner.registers[formal] = held
        self._put_in(function, inner, guard, line)

    def _put_in(
        self, function: functions.Function, inner: _Scope, guard: Register | None, line: int
    ) -> None:
        """Lanes that the guard excludes go to where the others return."""
        code, outside, returns = self.out.code, self.at, self.returns
        self.at, self.returns = function.at, []
        if guard is not None:
            skipped = replace(guard, negated=not guard.negated)
            self.returns.append(len(code))
            code.append(Instruction("bra", (), skipped, line, f"call {function.name}"))
        self.calls.append(function.name)
        self._body(inner)
        self.calls.pop()
        for index in self.returns:
            code[index] = replace(code[index], targets=(len(code),))
        self.at, self.returns = outside, returns

    def _instruction(self, text: str, scope: _Scope, line: int) -> None:
        rest, guard = text, None
        if text.startswith("@"):
            head, rest = (*text[1:].split(None, 1), "", "")[:2]
            held = self._operand(head, scope, line)
            if not isinstance(held, Register) or held.width != 1:
                raise self._fail(f"guard {head!r} is not a predicate", line)
            guard = held
        opcode, tail = (*re.split(r"\s+|(?=[{\[])", rest, maxsplit=1), "")[:2]
        if len(self.out.code) >= MOST:
            raise self._fail(f"more than {MOST} instructions, calls put in", line)
        self.real = "<d" if opcode.endswith(".f64") else "<f"
        if opcode in ("call", "call.uni"):
            self._call(tail, guard, scope, line)
            return
        if opcode in ("ret", "ret.uni") and self.calls:
            self.returns.append(len(self.out.code))
            self.out.code.append(Instruction("bra", (), guard, line, text))
            return
        if opcode.split(".")[0] in ("bra", "brx"):
            if not (index := split(tail)):
                raise self._fail(f"{opcode} names no label", line)
            self.branches.append((len(self.out.code), scope, index.pop()))
            operands = tuple(self._operand(o, scope, line) for o in index)
        else:
            operands = tuple(self._operand(o, scope, line) for o in split(tail))
        self.out.code.append(Instruction(opcode, operands, guard, line, text))

    def _operand(self, text: str, scope: _Scope, line: int) -> Operand:
        if found := scope.register(text):
            return found
        if text == "_":
            return Sink()
        if text[:1] == "{" and text[-1:] == "}":
            return Vector(tuple(self._operand(o, scope, line) for o in split(text[1:-1])))
        if text[:1] == "[" and text[-1:] == "]":
            return self._address(text[1:-1].strip(), scope, line)
        if text.count("|") == 1:
            first, second = (self._operand(t.strip(), scope, line) for t in text.split("|"))
            return Pair(first, second)
        if (value := number(text, self.real)) is not None:
            return Immediate(value)
        if text[:1] == "!" and (found := scope.register(text.lstrip("!"))):
            return replace(found, negated=True)
        if _SPECIAL.match(text):
            return Special(text)
        if text[:1] != "%" and re.match(rf"{_NAME}$", text):
            return Symbol(text)
        raise self._fail(f"unknown operand {text!r}", line)

    def _address(self, text: str, scope: _Scope, line: int) -> Address:
        parts = split(text)
        if len(parts) not in (1, 2):
            raise self._fail(f"unknown address [{text}]", line)
        base, offset = parts[0], 0
        match = re.match(rf"({_NAME})\s*([+-].+)$", base)
        if match:
            base = match[1]
            plus = number(match[2].replace("+", "").replace(" ", ""))
            if plus is None:
                raise self._fail(f"unknown address offset {match[2]!r}", line)
            offset = plus
        coordinates = None
        if len(parts) == 2:
            held = self._operand(parts[1], scope, line)
            if not isinstance(held, Vector):
                raise self._fail(f"{parts[1]!r} is not a vector of coordinates", line)
            coordinates = held
        return Address(self._operand(base, scope, line), offset, coordinates)
