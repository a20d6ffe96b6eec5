"""Atoms of both targets that copy between global and shared memory: cp.async, of which every lane
copies 16 bytes, and bulk copies without a tensor map; and narrow loads.

A lane waits for its own group of copies, or they arrive at an mbarrier. They write through the
generic proxy: who reads through the async one needs a fence behind the wait. A bulk load reads what
the kernel never writes; a bulk store belongs to its thread's bulk group.
"""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import CACHED, PREFETCHED, Text, written
from ptxflow.compiler.ir import Statement

WORD, CHUNK = 4, 16  # bytes of a lane
LINE, BLOCK = 128, 1024  # bytes of eight lanes, and of eight lines
_FILLED = Rule("it is all of its slot", lambda u: u.src[0].arg == u.arg.attr("bytes"))
_WHOLE = Rule("it copies whole chunks of 16 bytes", lambda u: u.arg.attr("bytes") % 16 == 0)
_COUNTED = Rule("tx bytes are below 2^20", lambda u: 0 < u.arg.attr("bytes") < 2**20)


def _copied(*address: str) -> Text:
    """16 bytes of a lane from an address in %rda, or zeros; where `first` is said, for each block
    of 1 KiB, from consecutive lines. Addresses are those of the first block, plus constants."""
    source = written("", *address)

    def write(use: Statement, text: dict[str, str]) -> str:
        ahead, first, every = *map(use.arg.attr, ("prefetch", "first")), text["inside"] == "1"
        hint, size = (f".L2::{ahead}B" if ahead else ""), "16" if every else "16, %rb"
        lines = [] if every else [f"selp.u32 %rb, 16, 0, {text['inside']};"]
        lines += [source(use, text), f"add.u32 %ra, {text['dst_reg']}, {text['offset']};"]
        for i in range(1 if first is None else use.src[0].arg // BLOCK):
            places = f"[%ra+{i * BLOCK}], [%rda+{(first or 0) + i * LINE}]"
            lines.append(f"cp.async.cg.shared.global{hint} {places}, {size};")
        return "\n".join(lines)

    return write


def _wide(use: Statement) -> bool:
    size, first = use.src[0].arg, use.arg.attr("first")
    return bool(size == 32 * CHUNK if first is None else size % BLOCK == 0)


_chunk = _copied("mad.wide.u32 %rda, {index}, 16, {base};")
_word = written(
    "",
    "add.u32 %ra, {dst_reg}, {offset};",
    "mad.wide.u32 %rda, {index}, 4, {base};",
    "{inside.guard}cp.async.ca.shared.global [%ra], [%rda], 4;",
)
instruction(
    "copy_async(dst: smem w generic copies, offset: value, base: pointer, index inside: value, "
    "tile: global r read-only, prefetch: int=0, size: int=16)",
    lambda use, text: (_word if use.arg.attr("size") == WORD else _chunk)(use, text),
    "9.7.9.25.3.1 cp.async: 16 bytes of each lane, zeros where not `inside`, of which nothing "
    "is read then, or 4 of those that are `inside`; index counts these; complete with the lane's "
    "group, and for other lanes once they met; L2 may bring `prefetch` bytes at once",
    sass=("cp.async",),
    rules=(PREFETCHED, Rule("it copies 4 or 16", lambda u: u.arg.attr("size") in (WORD, CHUNK))),
)
instruction(
    "copies_commit(pipe: str='copies') orders -> commit",
    "cp.async.commit_group;",
    "9.7.9.25.3.2 cp.async.commit_group",
)
instruction(
    "copies_wait(pending: int) orders -> wait_copies",
    "cp.async.wait_group {pending};",
    "9.7.9.25.3.3 cp.async.wait_group: the lane's own copies have landed",
)


instruction(
    "copy_chunks(dst: smem w generic copies, offset: value, base: pointer, row column inside: "
    "value, tile: global r read-only, element pitch: int, first: int?=None, prefetch: int=0) warp",
    _copied(
        "mad.wide.u32 %rda, {column}, {element}, {base};",
        "mad.wide.u32 %rda, {row}, {pitch}, %rda;",
    ),
    "9.7.9.25 cp.async: 16 bytes of every lane, from a row and column that it names to its "
    "offset; zeros where not `inside`; rows are `pitch` bytes apart. Or a line of 128 bytes of "
    "every block of 1 KiB, from consecutive bytes of a row, `first` and up: each lane names the "
    "place in the first block of its 16 bytes",
    sass=("cp.async",),
    rules=(
        PREFETCHED,
        Rule(
            "rows begin at multiples of 16 bytes",
            lambda u: u.arg.attr("pitch") % CHUNK == (u.arg.attr("first") or 0) % CHUNK == 0,
        ),
        Rule("there are 16 bytes of each lane, or whole blocks", _wide),
    ),
)
instruction(
    "copies_arrive(bar: mbar) orders -> copies_arrive",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{bar}];",
    "9.7.13.15.17 cp.async.mbarrier.arrive.noinc: each lane arrives when all that it has "
    "copied so far has landed",
    sass=("cp.async.mbarrier.arrive",),
)


instruction(
    "bulk_load(dst: smem w async mbar, base: pointer, index: value, tile: global r read-only, "
    "bar: mbar, bytes element: int) one -> bulk_load",
    "mad.wide.u32 %rda, {index}, {element}, {base};\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{dst}], [%rda], {bytes}, [{bar}];",
    "9.7.9 cp.async.bulk; index counts elements; its bytes complete on the barrier",
    sass=("bulk copy g->s",),
    rules=(_WHOLE, _COUNTED, _FILLED),
)
instruction(
    "bulk_store(src: smem r async bulk, base: pointer, index: value, tile: global w async bulk, "
    "bytes element: int) one",
    "mad.wide.u32 %rda, {index}, {element}, {base};\n"
    "cp.async.bulk.global.shared::cta.bulk_group [%rda], [{src}], {bytes};",
    "9.7.9 cp.async.bulk; index counts elements; complete with its bulk group",
    sass=("bulk copy s->g",),
    rules=(_WHOLE, _FILLED),
)


def _narrow_text(use: Statement, text: dict[str, str]) -> str:
    cache = use.arg.attr("cache")
    return (
        f"mad.wide.u32 %rda, {text['index']}, 2, {text['base']};\n"
        f"ld.global.nc{cache and '.' + cache}.b16 %rh, [%rda];\n"
        f"cvt.f32.{use.arg.attr('dtype')} {text['dst']}, %rh;"
    )


instruction(
    "ld_global_narrow(dst: frag*1 w, base: pointer, index: value, tile: global r read-only, "
    "dtype: str, cache: str='')",
    _narrow_text,
    "9.7.9.9 ld.global.nc of one 16-bit value, widened (9.7.9.22 cvt); index counts elements",
    sass=("ld.global.nc",),
    rules=(CACHED,),
)
