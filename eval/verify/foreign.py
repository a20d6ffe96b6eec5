"""Runs any sm_90a or sm_100a PTX kernel in the emulator under adversarial schedules, and says what
it found: races, faults, deadlocks, wrong values, each with the lines of the text."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from ptxflow.command import BadInput
from ptxflow.compiler.emulator import Fault, PtxSyntaxError
from ptxflow.compiler.emulator import tensormap as maps
from ptxflow.compiler.emulator.fault import Endless
from ptxflow.compiler.emulator.machine import Machine
from ptxflow.compiler.emulator.memory import PARAM_BASE
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import Module, parse
from ptxflow.compiler.emulator.race import shorten
from ptxflow.compiler.emulator.warp import Warp
from ptxflow.compiler.launch import NO_ARGUMENTS, Arguments, TensorMapParam
from ptxflow.eval.verify.launch_file import Array, Buffer, LaunchFile, Number, Passed, Pointer

MOST_TEXT = 64 << 20  # bytes
LIMIT = 5_000_000  # instructions of warps, of one schedule
MOST_LOCAL = 512 << 10  # bytes of a thread
_ENTRY = re.compile(r"^[^/\n]*\.entry\s+([\w$%]+)", re.M)
T = TypeVar("T")
_LINE = re.compile(r"\bline (\d+)")


@dataclass(frozen=True)
class Rule:
    """A kind of finding: what its messages match, what would fix it. A note does not count."""

    id: str
    pattern: str
    fix: str
    level: str = "error"


RULES = (
    Rule("value", "^output", "the arithmetic, or the launch: the memory model was kept"),
    Rule("deadlock", "^deadlock", "the arrival, bytes or warp that what is listed waits for"),
    Rule("uninitialized", r"never wrote|never written|nothing (has )?wr|initialised at",
         "write it first, or wait for what writes it"),
    Rule("dependent-launch", "griddepcontrol", "griddepcontrol.wait before it"),
    Rule("proxy-fence", r"fence\.proxy\.async",
         "fence.proxy.async by who accessed through the generic proxy, before it hands on"),
    Rule("same-value", "the same value is written", "one writer", "note"),
    Rule("mbarrier-lifetime", r"after its init|no mbarrier\.inval|no inval|a second time$|mbarrier$"
         "|overwrites mbarrier", "fence.mbarrier_init and a barrier after mbarrier.init; "
         "mbarrier.inval before other use"),
    Rule("tcgen05-fence", r"tcgen05\.fence",
         "tcgen05.fence::before_thread_sync, the barrier, ::after_thread_sync"),
    Rule("mbarrier-count", r"arrivals at|tx-count|mbarrier count|nobody has seen|parity \w+ is n",
         "the count of mbarrier.init, the bytes of expect_tx, the parity modulo 2"),
    Rule("race", "race:|store to the same bytes|disagree",
         "a barrier, or a release and an acquire of fitting scope"),
    Rule("exit", "work in flight|has exited|have exited|reaches in|were not dealloc",
         "wait before ret"),
    Rule("in-flight", r"in flight|no wait|may still read|still (writ|work)|wgmma\.fence|, which wg"
         "|overwrites what|to write", "the wait that belongs to it"),
    Rule("out-of-bounds", "outside|no tensor map|not in this CTA|not allocated|out of reach|of rank"
         "|in another CTA|no allocation|no scalar parameter|coordinates",
         "the address, the size, or the launch"),
    Rule("misaligned", "multiples? of", "the address, or the size"),
    Rule("convergence", "converged|member mask|differs between|not active|second time|threads"
         "|arrive twice|without an arrive", "the branch around it, its mask or its count"),
    Rule("execution", "", "its operands"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What is wrong at a line of the text; `related` are other lines that it names, `schedules`
    those that showed it. Line 0: the kernel as a whole."""

    rule: Rule
    line: int
    message: str
    related: tuple[int, ...]
    schedules: tuple[int, ...]


@dataclass
class Verdict:
    """What the schedules showed. `unreached`: lines that none executed; `stopped`: why a schedule
    did not come to its end, if one did not."""

    schedules: int
    findings: list[Finding] = field(default_factory=list)
    instructions: int = 0
    unreached: tuple[int, ...] = ()
    stopped: str = ""

    @property
    def errors(self) -> int:
        return sum(f.rule.level == "error" for f in self.findings)


def unforeseen(error: Exception) -> str:
    """What the emulator trips over, which it should refuse by itself."""
    return f"not modelled ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


class ForeignMachine(Machine):
    """A machine whose parameters come from a launch file, with a limit for the whole grid."""

    def __init__(
        self, program: Program, given: LaunchFile, words: Mapping[str, Array], seed: int, limit: int
    ):
        self.given = given
        launch, block = given.launch, given.block
        super().__init__(program, launch, words, {}, seed, 0, NO_ARGUMENTS, limit, block)
        for buffer in given.buffers:
            if buffer.blank:
                self.memory.named[buffer.name].shadow.begin_blank()
        if given.dependent:
            self.races.depend([self.memory.named[name].shadow for name in given.dependent])

    def _bind(self, axes: Mapping[str, int], arguments: Arguments) -> None:
        declared, given = self.module.parameters, self.given.params
        if len(declared) != len(given):
            raise ValueError(
                f"{self.module.entry} has {len(declared)} parameters, not {len(given)}"
            )
        for i, (parameter, parts) in enumerate(zip(declared, given, strict=True)):
            start = PARAM_BASE + self.program.parameters[parameter.name]
            for passed in parts:
                size = self._pass(start + passed.at, passed, parameter.kind)
                fits = passed.at + size <= parameter.bytes
                if not fits or (len(parts) == 1 and not passed.at and size != parameter.bytes):
                    raise ValueError(
                        f"params[{i}] passes {size} bytes at {passed.at}, "
                        f"{parameter.name} has {parameter.bytes}"
                    )

    def _pass(self, at: int, passed: Passed, kind: str) -> int:
        """Bytes that are passed at an address of parameter space, where a type is declared."""
        match passed.value:
            case TensorMapParam() as described:
                if at % 64:
                    raise ValueError("a tensor map needs a parameter of .align 64")
                held = self.memory.named[described.tensor]
                dtype = np.dtype({"bfloat16": "uint16"}.get(described.dtype, described.dtype))
                usable = len(held.data) // dtype.itemsize * dtype.itemsize
                typed = held.data[:usable].view(dtype)
                buffer = type(held)(held.name, held.base, typed, held.data, held.shadow)
                self.maps[at] = maps.encode(described, buffer, {})
                return 128
            case Pointer(buffer=name, offset=offset):
                base = 0 if name is None else self.memory.named[name].base
                self.constants[at] = (8, base + offset)
                return 8
            case Number() as number:
                octets = number.octets(kind)
                self.constants[at] = (len(octets), int.from_bytes(octets, "little"))
                return len(octets)
            case bytes() as octets:
                self.constants[at] = (len(octets), int.from_bytes(octets, "little"))
                return len(octets)

    def _turn(self, w: Warp) -> int:
        try:
            return super()._turn(w)
        except Fault:
            raise
        except Exception as error:
            ins = self.module.code[w.at]
            where = f"line {ins.line}: `{shorten(ins.text)}`"
            raise Fault(f"{where}: {unforeseen(error)}") from None


def understood(build: Callable[[], T]) -> T:
    """What is built of a text; BadInput where it is not understood."""
    try:
        return build()
    except PtxSyntaxError as error:
        raise BadInput(str(error)) from None
    except Exception as error:
        raise BadInput(f"the text is {unforeseen(error)}") from None


def read_kernel(text: str, entry: str = "") -> Module:
    """The kernel of a text, by default its only one; BadInput says what is not understood."""
    names = list(dict.fromkeys(_ENTRY.findall(text)))
    if not entry and len(names) > 1:
        raise BadInput(f"the text has the entries {', '.join(names)}: name one (field entry)")
    if entry and entry not in names:
        raise BadInput(f"the text has no entry {entry}; there are {', '.join(names) or 'none'}")
    module = understood(lambda: parse(text, entry))
    number = re.match(r"sm_(\d+)", module.target)
    if not number or not (int(number[1]) <= 90 or int(number[1]) in (100, 103)):
        raise BadInput(f".target {module.target}: sm_90a, sm_100a and older ones are modelled")
    return module


def check(text: str, given: LaunchFile, schedules: int = 4, limit: int = LIMIT) -> Verdict:
    """Run the kernel under schedules 0, 1, ...; each begins from the same memory.

    `limit` is in instructions of warps, a schedule. BadInput where text or launch are no good.
    """
    module = read_kernel(text, given.launch.entry)
    given = replace(given, launch=replace(given.launch, entry=module.entry))
    program = understood(lambda: Program(module))
    if program.local_bytes > MOST_LOCAL:
        raise BadInput(f"{program.local_bytes} bytes of .local exceed {MOST_LOCAL} a thread")
    verdict = Verdict(schedules)
    seen: dict[str, list[int]] = {}
    for seed in range(schedules):
        for message in _run(program, given, seed, limit, verdict):
            seen.setdefault(message, []).append(seed)
        if verdict.stopped:
            break
    verdict.findings = _findings(seen)
    verdict.instructions, reached = sum(program.coverage.hits), program.coverage.executed
    verdict.unreached = tuple(
        sorted({ins.line for i, ins in enumerate(module.code) if not reached(i)})
    )
    return verdict


def _run(program: Program, given: LaunchFile, seed: int, limit: int, verdict: Verdict) -> list[str]:
    """The messages of one schedule."""
    words = {b.name: b.octets.copy() for b in given.buffers}
    try:
        machine = ForeignMachine(program, given, words, seed, limit)
    except (ValueError, Fault) as error:
        raise BadInput(f"the launch does not fit: {error}") from None
    fault = ""
    try:
        machine.run()
    except Endless as error:
        done = machine.report.clusters
        where = str(error).split("\n")[1].strip()
        verdict.stopped = (
            f"schedule {seed} was stopped after {limit} instructions, {done} clusters done, at "
            f"{where}: an endless loop, a wait for another cluster (clusters run one after "
            "another), or a long run: --limit, or a smaller grid"
        )
    except Fault as error:
        fault = str(error)
    except Exception as error:
        fault = unforeseen(error)
    if "not modelled" in fault:
        verdict.stopped, fault = f"schedule {seed}: {fault}", ""
    found = [*machine.report.hazards, *([fault] if fault else [])]
    if not fault and not verdict.stopped:
        found += [m for b in given.buffers if (m := _difference(b, words[b.name]))]
    return found


def _difference(buffer: Buffer, words: Array) -> str:
    """A sentence where a buffer does not hold what is expected."""
    if buffer.expected is None:
        return ""
    got, wanted = buffer.values(words), buffer.expected
    absolute, relative = buffer.tolerance
    wrong = np.flatnonzero(~np.isclose(got, wanted, relative, absolute, equal_nan=True))
    if not len(wrong):
        return ""
    first = tuple(int(i) for i in np.unravel_index(wrong[0], buffer.shape))
    return (
        f"output {buffer.name}: {len(wrong)} of {len(got)} elements are wrong, the first at "
        f"{list(first)}: {got[wrong[0]]:.6g}, expected {wanted[wrong[0]]:.6g}"
    )


def _findings(seen: Mapping[str, Iterable[int]]) -> list[Finding]:
    """One for each rule and line, in the order of the text; its message is the first."""
    out: dict[tuple[str, int], Finding] = {}
    for message, seeds in seen.items():
        said = re.sub("`[^`]*`", "", message)
        rule = next(r for r in RULES if re.search(r.pattern, said))
        lines = [int(n) for n in _LINE.findall(message)]
        key = rule.id, lines[0] if lines else 0
        message = message.removeprefix(f"line {key[1]}: ")
        old = out.get(key)
        related = tuple(dict.fromkeys(n for n in lines[1:] if n != key[1]))
        schedules = {*seeds, *(old.schedules if old else ())}
        out[key] = Finding(
            rule, key[1], old.message if old else message, old.related if old else related,
            tuple(sorted(schedules)),
        )  # fmt: skip
    return sorted(out.values(), key=lambda f: (f.line, f.rule.id))
