"""What tuning sessions learned of moves, kept over sessions, definitions and devices: SQLite.

A row says of a move in a state (see `Gaps.state`) on a device how often it was tried, how often it
helped, and the sum and the sum of squares of its gains, which are ln(time before / time after). An
expectation pools them: rows of the state itself count whole, those of the family in another state a
half, those of other families a tenth, and the move's own strength is a prior of two tries.

    ptxflow knowledge show FILE                  moves by state, the most tried first
    ptxflow knowledge export FILE > LINES        JSON lines, for review and for others
    ptxflow knowledge import FILE OTHER...       add exported rows or other bases; also: merge
    ptxflow knowledge page FILE --into docs/moves.md --plot plots/moves.png

Each of these takes sessions, too, in the packed form of eval/tune/report.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.compiler.files import typed, write_whole
from ptxflow.eval.bench.markdown import markdown, placed
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.tune.moves import Move

VERSION = 1
PRIOR, PRIOR_GAIN, PRIOR_SPREAD = 2.0, 0.05, 0.02  # tries; gain of strength 1; of one try
HELPED = 0.005  # gain from which a move helped
WEIGHTS = 1.0, 0.5, 0.1  # rows of the state, of its family, of others
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


Row = Entry | Follow


@dataclass(frozen=True)
class Outcome:
    """A try: the gain of a move from a state, and the move that was taken before it, if any."""

    state: str
    move: str
    gain: float
    before: str = ""


@dataclass(frozen=True)
class Expected:
    """The mean gain of a move and the standard error of it."""

    mean: float
    spread: float
    tried: int


class Experience:
    """Entries read once: what a session knows from its beginning to its end."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.by_move: dict[str, list[Entry]] = {}
        for entry in (r for r in rows if isinstance(r, Entry)):
            self.by_move.setdefault(entry.move, []).append(entry)

    def of(self, state: str, move: Move) -> Expected:
        """What the move should gain in the state."""
        n, gain = PRIOR, PRIOR * PRIOR_GAIN * move.strength
        squares = PRIOR * (PRIOR_SPREAD**2 + (PRIOR_GAIN * move.strength) ** 2)
        tried = 0
        for entry in self.by_move.get(move.name, ()):
            alike = entry.state.split()[0] == state.split()[0]
            weight = WEIGHTS[0 if entry.state == state else 1 if alike else 2]
            n, gain = n + weight * entry.tried, gain + weight * entry.gain
            squares += weight * entry.squares
            tried += entry.tried * (entry.state == state)
        mean = gain / n
        return Expected(mean, math.sqrt(max(squares / n - mean**2, 0.0) / n), tried)


class Knowledge:
    """The file; every write is one transaction, and other processes may write between them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT)) as found:
                found.execute("pragma journal_mode=wal")
                with found:
                    version = found.execute("pragma user_version").fetchone()[0]
                    if version not in (0, VERSION):
                        raise BadInput(
                            f"{self.path}: knowledge of version {version}; this reads {VERSION}"
                        )
                    found.executescript(TABLES)
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

    def learn(self, session: str, device: str, outcomes: Sequence[Outcome]) -> bool:
        """Add a session's tries; False where this session was added before."""
        with self._open() as db:
            if db.execute("select 1 from sessions where id = ?", (session,)).fetchone():
                return False
            db.execute("insert into sessions values (?)", (session,))
            _add(db, rows_of(device, outcomes))
        return True

    def merge(self, rows: Sequence[Row]) -> int:
        """Add rows, as of another base's export; how many."""
        with self._open() as db:
            _add(db, rows)
        return len(rows)


def rows_of(device: str, outcomes: Iterable[Outcome]) -> list[Row]:
    """What tries add to a base."""
    found: list[Row] = []
    for o in outcomes:
        helped = int(o.gain >= HELPED)
        found.append(Entry(o.state, o.move, device, 1, helped, o.gain, o.gain**2))
        if o.before:
            found.append(Follow(o.state, o.before, o.move, 1, helped))
    return found


def summed(rows: Iterable[Row]) -> list[Row]:
    """One row of each state and move, or of two that follow."""
    held: dict[Row, Row] = {}
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
            held = file.read_bytes()
            texts = [held] if path.is_dir() else lzma.decompress(held).splitlines()
            states += [json.loads(text) for text in texts]
        except (OSError, ValueError, lzma.LZMAError) as error:
            raise BadInput(f"{file}: no session: {error}") from None
    return [s for s in states if isinstance(s, dict) and "champion" in s]


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
            entry = typed(Follow(**held) if "before" in held else Entry(**held))
            if not 0 <= entry.helped <= entry.tried:
                raise ValueError("helped must be a count from 0 to tried")
            if isinstance(entry, Entry) and not all(
                map(math.isfinite, (entry.gain, entry.squares))
            ):
                raise ValueError("gain and squares must be finite")
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"{where}:{number}: no entry of a knowledge base: {error}") from None
        found.append(entry)
    return found


# The command -------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("action", choices=("show", "export", "import", "merge", "page"))
    parser.add_argument("file", type=Path, help="the knowledge base; lines to show, or for a page")
    parser.add_argument("others", type=Path, nargs="*", help="what is added: bases or lines")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="the page to renew")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="which moves follow which")
    return parser


def read(path: Path) -> list[Row]:
    """The rows of a base, of sessions, or of JSON lines; BadInput where the file is neither."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    if path.read_bytes()[:6] == b"SQLite":
        return [*Knowledge(path).entries(), *Knowledge(path).follows()]
    if path.suffix == ".xz":
        own = [r for s in ended(path) for r in rows_of(s["settings"]["device"], outcomes(s))]
        return sorted(summed(own), key=lambda r: -r.tried)
    return from_lines(path.read_text(errors="replace"), str(path))


def shown(rows: Sequence[Row]) -> str:
    """Tables of moves by state and of which move followed which."""
    found = [r for r in rows if isinstance(r, Entry)]
    entries = [
        [e.state, e.move, e.device, str(e.tried), str(e.helped), f"{e.gain / e.tried:+.2%}"]
        for e in sorted(found, key=lambda e: (e.state, -e.tried, e.move))
    ]
    if not entries:
        return "nothing was learned yet"
    head = ["state", "move", "device", "tried", "helped", "mean gain"]
    follows = [[str(v) for v in asdict(r).values()] for r in rows if isinstance(r, Follow)]
    after = [["state", "after", "move", "tried", "helped"], *follows]
    return align([head, *entries]) + (f"\n\n{align(after)}" if follows else "")


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
    if args.action in ("import", "merge"):
        if not args.others:
            raise BadInput(f"{args.action} takes what to add")
        added = [Knowledge(args.file).merge(read(path)) for path in args.others]
        print(f"{sum(added)} rows added to {args.file}")
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
