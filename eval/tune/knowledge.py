"""What tuning sessions learned of moves, kept over sessions, definitions and devices: SQLite.

A row says of a move in a state (see `Gaps.state`) on a device how often it was tried, how often it
helped, and the sum and the sum of squares of its gains, which are ln(time before / time after). An
expectation pools them: rows of the state itself count whole, those of the family in another state a
half, those of other families a tenth, and the move's own strength is a prior of two tries.

    ptxflow knowledge show FILE                  moves by state, the most tried first
    ptxflow knowledge export FILE > LINES        JSON lines, for review and for others
    ptxflow knowledge import FILE LINES...       add exported rows
    ptxflow knowledge merge FILE OTHER...        add other bases
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.eval.tune.moves import Move

VERSION = 1
PRIOR, PRIOR_GAIN, PRIOR_SPREAD = 2.0, 0.05, 0.02  # tries; gain of strength 1; of one try
HELPED = 0.005  # gain from which a move helped
WEIGHTS = 1.0, 0.5, 0.1  # rows of the state, of its family, of others
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

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.by_move: dict[str, list[Entry]] = {}
        for entry in entries:
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

    def follows(self) -> list[tuple[str, str, str, int, int]]:
        """(state, move, the move after it, tried, helped), the most tried first."""
        with self._open() as db:
            return db.execute("select * from follows order by tried desc, state").fetchall()

    def learn(self, session: str, device: str, outcomes: Sequence[Outcome]) -> bool:
        """Add a session's tries; False where this session was added before."""
        with self._open() as db:
            if db.execute("select 1 from sessions where id = ?", (session,)).fetchone():
                return False
            db.execute("insert into sessions values (?)", (session,))
            for o in outcomes:
                helped = int(o.gain >= HELPED)
                _add(db, Entry(o.state, o.move, device, 1, helped, o.gain, o.gain**2))
                if o.before:
                    db.execute(
                        "insert into follows values (?, ?, ?, 1, ?) on conflict do update set "
                        "tried = tried + 1, helped = helped + excluded.helped",
                        (o.state, o.before, o.move, helped),
                    )
        return True

    def merge(self, entries: Iterable[Entry]) -> int:
        """Add rows, as of another base's export; how many."""
        count = 0
        with self._open() as db:
            for count, entry in enumerate(entries, 1):  # noqa: B007
                _add(db, entry)
        return count


def _add(db: sqlite3.Connection, entry: Entry) -> None:
    db.execute(
        "insert into entries values (:state, :move, :device, :tried, :helped, :gain, :squares) "
        "on conflict do update set tried = tried + excluded.tried, "
        "helped = helped + excluded.helped, gain = gain + excluded.gain, "
        "squares = squares + excluded.squares",
        asdict(entry),
    )


def to_lines(entries: Iterable[Entry]) -> str:
    """JSON lines, for review and for another base."""
    return "".join(json.dumps(asdict(e), sort_keys=True) + "\n" for e in entries)


def from_lines(text: str, where: str) -> list[Entry]:
    """BadInput, one line, for what is not an export."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = Entry(**json.loads(line))
            counts = isinstance(entry.tried, int) and isinstance(entry.helped, int)
            if not (counts and 0 <= entry.helped <= entry.tried):
                raise ValueError("helped must be a count from 0 to tried")
            if not math.isfinite(float(entry.gain)) or not math.isfinite(float(entry.squares)):
                raise ValueError("gain and squares must be finite")
        except (ValueError, TypeError) as error:
            raise BadInput(f"{where}:{number}: no entry of a knowledge base: {error}") from None
        found.append(entry)
    return found


# The command -------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("action", choices=("show", "export", "import", "merge"))
    parser.add_argument("file", type=Path, help="the knowledge base")
    parser.add_argument("others", type=Path, nargs="*", help="what import and merge add")
    return parser


def shown(base: Knowledge) -> str:
    """Tables of moves by state and of which move followed which."""
    entries = sorted(base.entries(), key=lambda e: (e.state, -e.tried, e.move))
    rows = [
        [e.state, e.move, e.device, str(e.tried), str(e.helped), f"{e.gain / e.tried:+.2%}"]
        for e in entries
    ]
    if not rows:
        return f"{base.path}: nothing was learned yet"
    head = ["state", "move", "device", "tried", "helped", "mean gain"]
    follows = [[*names, str(tried), str(helped)] for *names, tried, helped in base.follows()]
    after = [["state", "after", "move", "tried", "helped"], *follows]
    return align([head, *rows]) + (f"\n\n{align(after)}" if follows else "")


@reports("knowledge")
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    adds = args.action in ("import", "merge")
    if adds != bool(args.others):
        raise BadInput(f"{args.action} takes {'what to add' if adds else 'one file'}")
    for path in [*([] if adds else [args.file]), *args.others]:
        if not path.is_file():
            raise BadInput(f"{path}: no such file")
    base = Knowledge(args.file)
    if args.action == "show":
        print(shown(base))
    elif args.action == "export":
        print(to_lines(base.entries()), end="")
    else:
        texts = {p: p.read_text() for p in args.others} if args.action == "import" else {}
        lists = [from_lines(text, str(p)) for p, text in texts.items()]
        lists += [] if texts else [Knowledge(p).entries() for p in args.others]
        print(f"{sum(map(base.merge, lists))} rows added to {args.file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
