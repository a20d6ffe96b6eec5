"""What the cache holds: cubins, proofs, disassemblies and emulations, by what they were made of.

Safe while other processes and hosts use it: what is removed is made again.
"""

import time
from collections.abc import Sequence

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import cache


@reports("cache")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where the cache cannot be read."""
    parser = Parser(
        prog="ptxflow cache",
        description=__doc__,
        epilog="example: ptxflow cache --unused 30 --damaged",
    )
    add = parser.add_argument
    about = "remove what nobody asked for in so many days (at a URL: what was written before)"
    add("--unused", type=float, metavar="DAYS", default=float("inf"), help=about)
    add("--damaged", action="store_true", help="read all of it, and remove what is damaged")
    args = parser.parse_args(argv)
    store = cache.store()
    count, size, gone = store.clear(time.time() - 86400 * args.unused, args.damaged)
    print(f"{store.place}: {count:,} entries, {size / 2**20:,.1f} MiB; {gone:,} removed")
    return 0
