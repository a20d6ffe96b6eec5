"""What tuning sessions learned, kept over sessions, definitions and devices: SQLite.

A row is the fastest kernel of a workload on a device (`Champion`), which sessions on workloads like
it begin with; or it says of a move in a state (see `Gaps.state`) on a device how often it was
tried, how often it helped, and the sum and the sum of squares of its gains, which are ln(time
before / time after). Gains of moves are kept for people and for language models that propose: by
them the loop chose no better than without.

    ptxflow knowledge show FILE                  moves by state, the most tried first; champions
    ptxflow knowledge export FILE > LINES        JSON lines, for review and for others
    ptxflow knowledge import FILE OTHER...       add exported rows or other bases; also: merge
    ptxflow knowledge pack FILE.jsonl.xz OTHER...  the same into packed lines, made anew
    ptxflow knowledge page FILE --into docs/moves.md --plot plots/moves.png

OTHER, and a FILE that is read, may be sessions, in the packed form of eval/tune/report.py, or
measurements. What `ptxflow tune` always begins with is made by

    ptxflow knowledge pack eval/results/champions.jsonl.xz eval/measurements/*.jsonl.xz
"""

import argparse
import functools
import json
import lzma
import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.compiler.files import typed, write_whole
from ptxflow.eval.bench.markdown import markdown, placed
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.tune.champions import COMMITTED, Champion, fastest, of_records, of_session

VERSION = 1
HELPED = 0.005  # gain from which a move helped
MEASURED = {"status", "timing_pass"}  # parts of a record, and of a packed one
SUMS = "tried", "helped", "gain", "squares"
WAIT = 30.0  # seconds for another process's write
TABLES = """
create table if not exists entries (
    state text, move text, device text, tried integer, helped integer, gain real, squares real,
    primary key (state, move, device));
create table if not exists sessions (id text primary key);
create table if not exists follows (
    state text, before text, after text, tried integer, helped integer,
    primary key (state, before, after));
create table if not exists champions (
    definition text, axes text, device text, family text, choices text, us real, share real,
    primary key (definition, axes, device));
"""
KEEP_FASTEST = """
insert into champions values (:definition, :axes, :device, :family, :choices, :us, :share)
on conflict do update set family = excluded.family, choices = excluded.choices, us = excluded.us,
share = excluded.share where excluded.us < us
"""


@dataclass(frozen=True)
class Entry:
    """A row: `gain` and `squares` are sums over the tries."""

    state: str
    move: str
    device: str
    tried: int
    helped: int
    gain: float
    squares: float


@dataclass(frozen=True)
class Follow:
    """How often a move was tried in a state right after another had made the champion."""

    state: str
    before: str
    after: str
    tried: int
    helped: int


Row = Entry | Follow | Champion


@dataclass(frozen=True)
class Outcome:
    """A try: the gain of a move from a state, and the move that was taken before it, if any."""

    state: str
    move: str
    gain: float
    before: str = ""


class Knowledge:
    """The file; every use is one transaction, for which those of other processes are waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            base = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            with closing(base) as found:
                found.execute("begin immediate")  # a lock to write, for which SQLite waits
                with found:
                    version = found.execute("pragma user_version").fetchone()[0]
                    if version not in (0, VERSION):
                        raise BadInput(
                            f"{self.path}: knowledge of version {version}; this reads {VERSION}"
                        )
                    for table in TABLES.split(";"):
                        found.execute(table)
                    found.execute(f"pragma user_version={VERSION}")
                    yield found
        except sqlite3.Error as error:
            raise BadInput(f"{self.path}: no knowledge base: {error}") from None

    def entries(self) -> list[Entry]:
        """All rows, by state and move; BadInput, one line, where the file is none."""
        with self._open() as db:
            rows = db.execute("select * from entries order by state, move, device").fetchall()
        return [Entry(*row) for row in rows]

    def follows(self) -> list[Follow]:
        """The most tried first."""
        with self._open() as db:
            rows = db.execute("select * from follows order by tried desc, state, before, after")
            return [Follow(*row) for row in rows.fetchall()]

    def champions(self) -> list[Champion]:
        """By definition, device and axes."""
        with self._open() as db:
            rows = db.execute("select * from champions").fetchall()
        return fastest(
            Champion(name, json.loads(axes), device, family, json.loads(choices), us, share)
            for name, axes, device, family, choices, us, share in rows
        )

    def learn(
        self,
        session: str,
        device: str,
        outcomes: Sequence[Outcome],
        champions: Sequence[Champion] = (),
    ) -> bool:
        """Add a session's tries and its champion; False where it was added before."""
        with self._open() as db:
            if db.execute("select 1 from sessions where id = ?", (session,)).fetchone():
                return False
            db.execute("insert into sessions values (?)", (session,))
            _add(db, [*rows_of(device, outcomes), *champions])
        return True

    def merge(self, rows: Sequence[Row]) -> None:
        """Add rows, as of another base's export."""
        with self._open() as db:
            _add(db, rows)


def rows_of(device: str, outcomes: Iterable[Outcome]) -> list[Entry | Follow]:
    """What tries add to a base."""
    found: list[Entry | Follow] = []
    for o in outcomes:
        helped = int(o.gain >= HELPED)
        found.append(Entry(o.state, o.move, device, 1, helped, o.gain, o.gain**2))
        if o.before:
            found.append(Follow(o.state, o.before, o.move, 1, helped))
    return found


def summed(rows: Iterable[Entry | Follow]) -> list[Entry | Follow]:
    """One row of each state and move, or of two that follow."""
    held: dict[Entry | Follow, Entry | Follow] = {}
    for row in rows:
        sums = {n: v for n, v in asdict(row).items() if n in SUMS}
        none: dict[str, Any] = dict.fromkeys(sums, 0)
        what = replace(row, **none)
        old = held.get(what, what)
        held[what] = replace(old, **{n: v + getattr(old, n) for n, v in sums.items()})
    return list(held.values())


def _add(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    for row in rows:
        held = asdict(row)
        if isinstance(row, Champion):
            held |= {"axes": row.workload[-1], "choices": json.dumps(dict(row.choices))}
            db.execute(KEEP_FASTEST, held)
            continue
        table = "entries" if isinstance(row, Entry) else "follows"
        sums = [n for n in held if n in SUMS]
        db.execute(
            f"insert into {table} values ({', '.join(f':{n}' for n in held)}) on conflict do "
            f"update set {', '.join(f'{n} = {n} + excluded.{n}' for n in sums)}",
            held,
        )


def ended(path: Path) -> list[dict[str, Any]]:
    """The sessions that ended: in a folder, or of a packed file, one a line. BadInput, one line,
    where one cannot be read."""
    states: list[dict[str, Any]] = []
    for file in sorted(path.rglob("session.json")) if path.is_dir() else [path]:
        try:
            states += map(json.loads, [file.read_bytes()] if path.is_dir() else _lines(file))
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: no session: {error}") from None
    return [s for s in states if isinstance(s, dict) and "champion" in s]


def _lines(path: Path) -> list[str]:
    """Of a text that may be packed; BadInput where it is damaged."""
    try:
        held = path.read_bytes()
        text = lzma.decompress(held) if path.suffix == ".xz" else held
        return text.decode(errors="replace").splitlines()
    except (OSError, lzma.LZMAError) as error:
        raise BadInput(f"{path}: {error}") from None


def _parts(line: str) -> Collection[str]:
    """The keys of an object; empty for anything else."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return ()
    return held if isinstance(held, dict) else ()


def outcomes(session: Mapping[str, Any]) -> list[Outcome]:
    """The tries of one move alone that a session which ended tells of."""
    at_roof = Floors(**session["floors_us"]).attainable
    known = {session["start"]["key"]: session["start"]["us"]}
    champion, last, found = session["start"]["key"], "", list[Outcome]()
    for made in session["rounds"]:
        before = known.get(made["start"]) or at_roof / made["gaps"]["share"]
        for b in (b for b in made["branches"] if math.isfinite(b["us"])):
            known[b["key"]] = b["us"]
            if len(b["moves"]) == 1 and not b["drawn"]:
                gain = math.log(before / b["us"])
                found.append(Outcome(made["state"], b["moves"][0], gain, last))
        if made["champion"] != champion:
            champion = made["champion"]
            last = next(
                (m for b in made["branches"] if b["key"] == champion for m in b["moves"]), ""
            )
    return found


def to_lines(rows: Iterable[Row]) -> str:
    """JSON lines, for review and for another base."""
    return "".join(json.dumps(asdict(row), sort_keys=True) + "\n" for row in rows)


def from_lines(text: str, where: str) -> list[Row]:
    """BadInput, one line, for what is not an export."""
    found: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            held = json.loads(line)
            kind = Champion if "choices" in held else Follow if "before" in held else Entry
            entry: Row = typed(kind(**held))
            if not isinstance(entry, Champion) and not 0 <= entry.helped <= entry.tried:
                raise ValueError("helped must be a count from 0 to tried")
            if not all(math.isfinite(v) for v in held.values() if isinstance(v, float)):
                raise ValueError("gains and times must be finite")
            if isinstance(entry, Champion) and min(entry.us, entry.share) <= 0:
                raise ValueError("times must be positive")
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"{where}:{number}: no entry of a knowledge base: {error}") from None
        found.append(entry)
    return found


# The command -------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("action", choices=("show", "export", "import", "merge", "pack", "page"))
    parser.add_argument("file", type=Path, help="the knowledge base; lines to show, or for a page")
    parser.add_argument("others", type=Path, nargs="*", help="what is added: bases or lines")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="the page to renew")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="which moves follow which")
    return parser


def read(*paths: Path) -> list[Row]:
    """The rows of bases, of sessions, of measurements, or of JSON lines, packed or not; BadInput
    where a file is none of these. Measurements are read together, so that those of one workload in
    several files are compared by its library."""
    rows, records = list[Row](), list[Path]()
    for path in paths:
        if not path.is_file():
            raise BadInput(f"{path}: no such file")
        if path.read_bytes()[:6] == b"SQLite":
            base = Knowledge(path)
            rows += [*base.entries(), *base.follows(), *base.champions()]
            continue
        lines = _lines(path)
        parts = _parts(lines[0]) if lines else ()
        if "settings" in parts:
            own = [r for s in ended(path) for r in rows_of(s["settings"]["device"], outcomes(s))]
            tried = sorted(summed(own), key=lambda r: -r.tried)
            rows += [*tried, *fastest(c for s in ended(path) for c in of_session(s))]
        elif MEASURED & {*parts}:
            records.append(path)
        else:
            rows += from_lines("\n".join(lines), str(path))
    return [*rows, *of_records(records)]


@functools.cache
def committed() -> Sequence[Row]:
    """What comes with ptxflow, read once."""
    return tuple(read(COMMITTED))


def shown(rows: Sequence[Row]) -> str:
    """Tables of moves by state, of which move followed which, and of champions."""
    found = [r for r in rows if isinstance(r, Entry)]
    entries = [
        [e.state, e.move, e.device, str(e.tried), str(e.helped), f"{e.gain / e.tried:+.2%}"]
        for e in sorted(found, key=lambda e: (e.state, -e.tried, e.move))
    ]
    if not rows:
        return "nothing was learned yet"
    head = ["state", "move", "device", "tried", "helped", "mean gain"]
    follows = [[str(v) for v in asdict(r).values()] for r in rows if isinstance(r, Follow)]
    best = [[r.definition, " ".join(f"{a}={v}" for a, v in r.axes.items()), r.device,
             f"{r.us:.2f}", f"{r.share:.1%}"] for r in rows if isinstance(r, Champion)]  # fmt: skip
    tables = (
        (head, entries),
        (["state", "after", "move", "tried", "helped"], follows),
        (["workload", "axes", "device", "us", "of attainable"], best),
    )
    return "\n\n".join(align([top, *body]) for top, body in tables if body)


def moves_table(rows: Sequence[Row]) -> str:
    """Of each move how often it was tried, helped and failed to, and where it helped most often."""
    held: dict[str, list[Entry]] = {}
    for row in rows:
        if isinstance(row, Entry):
            held.setdefault(row.move, []).append(row)
    table = []
    for move, own in sorted(held.items(), key=lambda item: -sum(e.tried for e in item[1])):
        tried, helped = sum(e.tried for e in own), sum(e.helped for e in own)
        best = max(own, key=lambda e: (e.helped, e.gain))
        where = f"{best.state}: {best.helped} of {best.tried}" if best.helped else "-"
        gain = f"{sum(e.gain for e in own) / tried:+.1%}"
        table.append([move, where, tried, helped, tried - helped, gain])
    return markdown(["move", "helped most in", "tried", "helped", "failed", "mean gain"], table, 2)


@reports("knowledge")
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if args.action in ("import", "merge", "pack"):
        if not args.others:
            raise BadInput(f"{args.action} takes what to add")
        rows = read(*args.others)
        if args.action == "pack":
            best = fastest(r for r in rows if isinstance(r, Champion))
            rows = [*summed(r for r in rows if not isinstance(r, Champion)), *best]
            with lzma.open(args.file, "wt", preset=9) as file:
                file.write(to_lines(rows))
        else:
            Knowledge(args.file).merge(rows)
        print(f"{len(rows)} rows {'in' if args.action == 'pack' else 'added to'} {args.file}")
        return 0
    if args.others:
        raise BadInput(f"{args.action} takes one file")
    rows = read(args.file)
    if args.action == "page":
        if not args.into or not args.plot:
            raise BadInput("page takes --into and --plot")
        from ptxflow.eval.tune.plots import follows  # matplotlib takes a second to load

        found = (r for r in rows if isinstance(r, Follow))
        follows(((r.before, r.after, r.tried, r.helped) for r in found), args.plot)
        write_whole(args.into, placed(args.into.read_text(), {"moves": moves_table(rows)}))
    else:
        print(shown(rows) if args.action == "show" else to_lines(rows).rstrip())
    return 0
