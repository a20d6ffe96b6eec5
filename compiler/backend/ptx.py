"""The PTX writer: a lowered kernel to PTX text, and nothing decided here.

Values are common-subexpression-eliminated by node identity within their scope; addresses come from
the storage layout; instructions come from the atom table.
"""

import hashlib
import re

from ptxflow.compiler.atoms.table import STORAGE_OF, Atom, atom
from ptxflow.compiler.device import Device
from ptxflow.compiler.ir import alu, body_of, const, kernels_of, param, show, special
from ptxflow.compiler.ir.nodes import PREDICATES, Op, Slot, Statement, Value
from ptxflow.compiler.lower import layout

ISA_VERSION = "8.8"  # driver 580 takes at most 9.0
_SMEM, _TMEM = special("smem"), special("tmem")
_REGISTER = re.compile(r"%[a-zA-Z_]\w*")
_SPECIAL = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|laneid|warpid|clusterid|nclusterid|cluster_\w+|"
    r"smid|clock\w*|globaltimer\w*|dynamic_smem_size)\b"
)
_INSTRUCTION = {
    "add": "add.u32", "sub": "sub.u32", "mul": "mul.lo.u32", "mulhi": "mul.hi.u32",
    "div": "div.u32", "rem": "rem.u32", "min": "min.u32",
    "xor": "xor.b32", "and": "and.b32", "or": "or.b32", "shl": "shl.b32", "shr": "shr.u32",
    "lt": "setp.lt.u32", "ge": "setp.ge.u32", "eq": "setp.eq.u32", "ne": "setp.ne.u32",
}  # fmt: skip
_PARAM_TYPES = {
    "map": ".param .align 64 .b8 {}[128]",
    "ptr": ".param .u64 {}",
    "u32": ".param .u32 {}",
}


def write(lowered: Statement, device: Device) -> str:
    """The PTX text of a lowered kernel, or of all kernels of a program, for the device."""
    header = [
        f".version {ISA_VERSION}",
        f".target {device.arch}",
        ".address_size 64",
        "",
        ".extern .shared .align 1024 .b8 dynamic_smem[];",
        "",
    ]
    return "\n".join([*header, "\n".join(_Writer(k).text() for k in kernels_of(lowered))])


def digest(text: str) -> str:
    """Of PTX, whatever its registers are called and declared: 32 hexadecimal digits.

    Registers are numbered in order of appearance; special ones keep their names.
    """
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        if _SPECIAL.match(match[0]):
            return match[0]
        return numbers.setdefault(match[0], f"%{len(numbers)}")

    lines = (line for line in text.splitlines() if not line.lstrip().startswith(".reg"))
    numbered = "\n".join(_REGISTER.sub(number, line) for line in lines)
    return hashlib.sha256(numbered.encode()).hexdigest()[:32]


def is_predicate(node: Value) -> bool:
    if node.op is not Op.ALU:
        return False
    return node.arg in PREDICATES or (
        node.arg in ("and", "or") and is_predicate(node.src[0]) and is_predicate(node.src[1])
    )


def reduced(node: Value) -> Value:
    """Division and remainder by a constant without dividing: ptxas leaves a real division there.

    Granlund and Montgomery's multiplication by a reciprocal that is rounded up; for divisors such
    as 7 rounded down, by which the dividend plus 1 is multiplied (Robison, N-bit unsigned division
    via N-bit multiply-add, 2005): it is not exact for one dividend, 2^32 - 1.
    """
    if node.op is not Op.ALU or node.arg not in ("div", "rem") or node.src[1].op is not Op.CONST:
        return node
    dividend = node.src[0]
    divisor: int = node.src[1].arg[0]
    if divisor & (divisor - 1) == 0:
        shift = divisor.bit_length() - 1
        return dividend >> shift if node.arg == "div" else dividend & (divisor - 1)
    multiplier, shift, more = reciprocal(divisor)
    quotient = alu("mulhi", dividend + more, const(multiplier)) >> shift
    return quotient if node.arg == "div" else dividend - quotient * divisor


def reciprocal(divisor: int) -> tuple[int, int, int]:
    """(m, s, a) with n // divisor == ((n + a) * m >> 32) >> s, for a divisor that is no power of
    two; where a is 1, for n below 2^32 - 1."""
    bits = (divisor - 1).bit_length()
    for shift in range(bits + 1):
        multiplier = -(-(1 << (32 + shift)) // divisor)
        if multiplier * divisor - (1 << (32 + shift)) <= 1 << shift and multiplier < 1 << 32:
            return multiplier, shift, 0
    return (1 << (31 + bits)) // divisor, bits - 1, 1


def stem(name: str) -> str:
    """What registers of that storage are called, but for their number: ptxas takes all digits at
    the end of a name for the number."""
    return f"%{name}_" if name[-1].isdigit() else f"%{name}"


class _Writer:
    def __init__(self, kernel: Statement):
        self.kernel, self.info = kernel, kernel.arg
        self.plan = layout(kernel.arg)
        self.lines: list[str] = []
        self.counts = {"r": 0, "rd": 0, "p": 0}
        self.labels = 0
        self.scopes: list[dict[object, str]] = [{}]

    # -- text ---------------------------------------------------------------------------------

    def text(self) -> str:
        self._entry()
        for statement in self.kernel.src:
            self._statement(statement)
        self._line("ret;")
        return "\n".join([*self._header(), *self._registers(), *self.lines, "}", ""])

    def _header(self) -> list[str]:
        info = self.info
        params = ",\n".join("\t" + _PARAM_TYPES[kind].format(name) for name, kind in info.params)
        out = [f".visible .entry {info.name}(", params, ")"]
        if info.cluster > 1:
            out += [".explicitcluster", f".reqnctapercluster {info.cluster}, 1, 1"]
        # setmaxnreg is ignored without both bounds
        return [*out, f".reqntid {32 * info.warps}, 1, 1", f".minnctapersm {info.resident}", "{"]

    def _registers(self) -> list[str]:
        out = [
            f"\t.reg .b32 %r<{self.counts['r'] + 1}>;",
            f"\t.reg .b64 %rd<{self.counts['rd'] + 1}>;",
            f"\t.reg .pred %p<{self.counts['p'] + 1}>;",
            "\t.reg .pred %pw, %pe;",
            "\t.reg .b32 %ra, %rb, %warp, %lane, %tmem, %smem;",
            "\t.reg .b64 %rda;",
            "\t.reg .b16 %rh;",
        ]
        for storage in self.info.storage:
            if storage.op is Op.FRAG:
                buffer = storage.arg
                out.append(f"\t.reg .{buffer.dtype} {stem(buffer.name)}<{buffer.size}>;")
        return out

    def _line(self, text: str) -> None:
        for line in text.split("\n"):
            self.lines.append(line if line.endswith(":") else "\t" + line)

    def _label(self, stem: str) -> str:
        self.labels += 1
        return f"{stem}_{self.labels}"

    def _new(self, kind: str) -> str:
        self.counts[kind] += 1
        return f"%{kind}{self.counts[kind]}"

    # -- values -------------------------------------------------------------------------------

    def _entry(self) -> None:
        self._line("mov.u32 %lane, %laneid;")
        self._warp_index()
        self._line("mov.u32 %smem, dynamic_smem;")
        for name, kind in self.info.params:
            self._load_param(name, kind)
        self._bind(special("warp"), "%warp")
        self._bind(special("lane"), "%lane")
        self._bind(_SMEM, "%smem")
        self._bind(_TMEM, "%tmem")
        for name, register in (
            ("ctaid", "%ctaid.x"),
            ("ctas", "%nctaid.x"),
            ("cta_rank", "%cluster_ctarank"),
        ):
            value = self._new("r")
            self._line(f"mov.u32 {value}, {register};")
            self._bind(special(name), value)

    def _warp_index(self) -> None:
        """The shuffle tells ptxas that the index is uniform."""
        self._line("mov.u32 %ra, %tid.x;")
        self._line("shr.u32 %ra, %ra, 5;")
        self._line("shfl.sync.idx.b32 %warp, %ra, 0, 31, 0xFFFFFFFF;")

    def _load_param(self, name: str, kind: str) -> None:
        node = param(name)
        if kind == "u32":
            value = self._new("r")
            self._line(f"ld.param.u32 {value}, [{name}];")
        else:
            value = self._new("rd")
            if kind == "ptr":
                self._line(f"ld.param.u64 {value}, [{name}];")
                self._line(f"cvta.to.global.u64 {value}, {value};")
            else:
                self._line(f"mov.b64 {value}, {name};")
                self._line(f"cvta.param.u64 {value}, {value};")
        self._bind(node, value)

    def _bind(self, key: object, register: str) -> None:
        self.scopes[-1][key] = register

    def _find(self, key: object) -> str | None:
        for scope in reversed(self.scopes):
            if key in scope:
                return scope[key]
        return None

    def _value(self, node: Value) -> str:
        """The operand text of a value: a literal or the register that holds it."""
        if node.op is Op.CONST:
            return str(node.arg[0])
        found = self._find(node)
        if found is not None:
            return found
        if node.op is Op.VAR and node.arg[1] == "register":
            return f"{stem(node.arg[0])}0"
        if node.op is not Op.ALU:
            raise ValueError(f"{show(node)} is not bound here: a loop variable outside its loop?")
        cheaper = reduced(node)
        if cheaper is not node:
            value = self._value(cheaper)
            self._bind(node, value)
            return value
        predicate = is_predicate(node)
        both = predicate and node.arg in ("and", "or")
        a, b = (self._value(s) if both else self._number(s) for s in node.src)
        if node.src[0].op is Op.CONST and node.arg not in ("add", "mul", "and", "or", "xor", "min"):
            a = self._register(a)
        value = self._new("p" if predicate else "r")
        name = _INSTRUCTION[node.arg]
        if both:
            name = f"{node.arg}.pred"
        if node.src[0].op is Op.CONST and node.src[1].op is not Op.CONST:
            a, b = (b, a) if node.arg in ("add", "mul", "and", "or", "xor", "min") else (a, b)
        elif node.src[0].op is Op.CONST:
            a = self._register(a)
        self._line(f"{name} {value}, {a}, {b};")
        self._bind(node, value)
        return value

    def _number(self, node: Value) -> str:
        """As `_value`; where that is a predicate, 1 or 0 in a register."""
        if not is_predicate(node):
            return self._value(node)
        key = ("number", node)
        found = self._find(key)
        if found is None:
            held, found = self._value(node), self._new("r")
            self._line(f"selp.u32 {found}, 1, 0, {held};")
            self._bind(key, found)
        return found

    def _register(self, operand: str) -> str:
        if operand.startswith("%"):
            return operand
        value = self._new("r")
        self._line(f"mov.u32 {value}, {operand};")
        return value

    def _predicate(self, node: Value) -> str:
        if is_predicate(node):
            return self._value(node)
        key = ("predicate", node)
        found = self._find(key)
        if found is None:
            found = self._new("p")
            self._line(f"setp.ne.u32 {found}, {self._register(self._value(node))}, 0;")
            self._bind(key, found)
        return found

    # -- addresses ----------------------------------------------------------------------------

    def _split(self, node: Value) -> tuple[Value, int]:
        """A value as (dynamic part, constant part)."""
        if node.op is Op.CONST:
            return const(0), node.arg[0]
        if node.op is Op.ALU and node.arg == "add":
            left, plus = self._split(node.src[0])
            right, more = self._split(node.src[1])
            return alu("add", left, right), plus + more
        return node, 0

    def _address(self, node: Slot) -> tuple[Value, int]:
        """A slot's address: a value to be in a register, and a constant to add."""
        storage, stage, offset = node.src
        buffer = storage.arg
        if storage.op is Op.TMEM:
            base, start = _TMEM, self.plan.tmem[storage]
        else:
            base, start = _SMEM, self.plan.smem[storage]
        dynamic, constant = self._split(alu("add", alu("mul", stage, buffer.size), offset))
        return alu("add", base, dynamic), start + constant

    def _plus(self, node: Slot) -> str:
        dynamic, constant = self._address(node)
        register = self._value(dynamic)
        return f"{register}+{constant}" if constant else register

    def _in_register(self, node: Slot) -> str:
        dynamic, constant = self._address(node)
        return self._value(alu("add", dynamic, constant))

    def _descriptor(self, node: Slot, step: int, constant_part: int) -> str:
        """A 64-bit matrix descriptor: address field of the slot, plus a K step, plus constants."""
        dynamic, constant = self._address(node)
        key = ("descriptor", dynamic, constant_part)
        base = self._find(key)
        if base is None:
            low, base = self._new("r"), self._new("rd")
            self._line(f"bfe.u32 {low}, {self._value(dynamic)}, 4, 14;")
            self._line(f"cvt.u64.u32 {base}, {low};")
            self._line(f"or.b64 {base}, {base}, 0x{constant_part:X};")
            self._bind(key, base)
        if not constant + step:
            return base
        value = self._new("rd")
        self._line(f"add.s64 {value}, {base}, {(constant + step) >> 4};")
        return value

    # -- statements ---------------------------------------------------------------------------

    def _statement(self, node: Statement) -> None:
        match node.op:
            case Op.ATOM:
                self._line(self._atom_text(node))
            case Op.LOOP:
                self._loop(node)
            case Op.IF:
                self._if(node)
            case Op.ROLE:
                self._role(node)
            case _:
                raise ValueError(f"{node.op} is not a statement")

    def _block(self, body: tuple[Statement, ...]) -> None:
        self.scopes.append({})
        for statement in body:
            self._statement(statement)
        self.scopes.pop()

    def _loop(self, node: Statement) -> None:
        index, start, stop, step = node.src[:4]
        value, done = self._new("r"), self._label("DONE")
        again = self._label("LOOP")
        limit = self._value(stop)
        by = self._value(step)
        self._line(f"mov.u32 {value}, {self._value(start)};")
        leave = self._new("p")
        self._line(f"setp.ge.u32 {leave}, {value}, {limit};")
        self._line(f"@{leave} bra {done};")
        self._line(f"{again}:")
        if node.arg:
            self._line('.pragma "nounroll";')  # ptxas looks for it behind the label
        self.scopes.append({index: value})
        self._block(body_of(node))
        self.scopes.pop()
        self._line(f"add.u32 {value}, {value}, {by};")
        stay = self._new("p")
        self._line(f"setp.lt.u32 {stay}, {value}, {limit};")
        self._line(f"@{stay} bra {again};")
        self._line(f"{done}:")

    def _if(self, node: Statement) -> None:
        condition, body, elected = node.src[0], body_of(node), node.arg
        always = condition.op is Op.CONST and condition.arg[0] == 1
        lines = all(s.op is Op.ATOM and not atom(s.arg.atom).label for s in body)
        if elected and always and lines:
            self._line("elect.sync _|%pe, 0xFFFFFFFF;")
            self.scopes.append({})
            for statement in body:
                for line in self._atom_text(statement).split("\n"):
                    self._line(f"@%pe {line}")
            self.scopes.pop()
            return
        skip = self._label("SKIP")
        if not always:
            self._line(f"@!{self._predicate(condition)} bra {skip};")
        if elected:
            self._line("elect.sync _|%pe, 0xFFFFFFFF;")
            self._line(f"@!%pe bra {skip};")
        self._block(body)
        self._line(f"{skip}:")
        if elected:
            self._line("bar.warp.sync 0xFFFFFFFF;")

    def _role(self, node: Statement) -> None:
        spec, skip = node.arg, self._label("ROLE")
        out = self._new("p")
        self._warp_index()  # anew: held across roles, ptxas spills it in some kernels
        self._line(f"// role {spec.name}: warps {spec.first}..{spec.first + spec.warps - 1}")
        if spec.first:
            below = self._new("r")
            self._line(f"sub.u32 {below}, %warp, {spec.first};")
            self._line(f"setp.ge.u32 {out}, {below}, {spec.warps};")
        else:
            self._line(f"setp.ge.u32 {out}, %warp, {spec.warps};")
        self._line(f"@{out} bra {skip};")
        if spec.elected:
            self._line("elect.sync _|%pe, 0xFFFFFFFF;")
            self._line(f"@!%pe bra {skip};")
        self._block(node.src)
        self._line(f"{skip}:")
        if spec.elected:
            self._line("bar.warp.sync 0xFFFFFFFF;")

    # -- atoms --------------------------------------------------------------------------------

    def _atom_text(self, node: Statement) -> str:
        row = atom(node.arg.atom)
        text = self._operands(row, node)
        if callable(row.ptx):
            return row.ptx(node, text)
        self.labels += 1
        text.update({name: str(attr) for name, attr in node.arg.attrs}, uid=str(self.labels))
        return row.ptx.format_map(text)

    def _operands(self, row: Atom, node: Statement) -> "_Operands":
        text = _Operands(self, row, node)
        for (name, kind), operand in zip(row.operands, node.src, strict=True):
            if kind == "frag":
                first = operand.src[2].arg[0]
                registers = stem(operand.src[0].arg.name)
                text[name] = ", ".join(f"{registers}{first + i}" for i in range(operand.arg))
            elif kind == "desc":
                step = node.arg.attr(f"{name}_step", 0)
                text[name] = self._descriptor(operand, step, node.arg.attr(f"{name}_desc"))
            elif kind == "value" and name in ("accumulate", "inside"):
                fixed = operand.op is Op.CONST  # an MMA takes the immediates 0 and 1 as well
                text[name] = str(operand.arg[0]) if fixed else self._predicate(operand)
            elif kind in ("value", "map"):
                text[name] = self._number(operand)
            elif kind in STORAGE_OF and kind != "global":
                text[name] = self._plus(operand)
        return text


class _Operands(dict[str, str]):
    """Operand text by name; `name_reg` is the address in a register, made when it is asked for."""

    def __init__(self, writer: _Writer, row: Atom, node: Statement):
        super().__init__()
        self._writer, self._row, self._node = writer, row, node

    def __missing__(self, key: str) -> str:
        operand = self._row.operand(self._node, key.removesuffix("_reg"))
        self[key] = self._writer._in_register(operand)
        return self[key]
