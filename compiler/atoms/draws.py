"""Atoms of both targets that draw a sample: fine masses, and the search for where a number falls.

A *fine mass* is rint(x 2^44), kept as two words (high 2^22 + low) where float32 makes it, in 64
bits where it is summed. A *share* is what a warp or a CTA has: both words of the mass above a key,
how many elements equal it, and 0. Of those *ties* an allowance is kept, the first ones. The *state*
of a search: whether the target lies here, how far in (low and high word), ties still allowed.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.reductions import ALL_LANES, scoped, skip_where_none, voted
from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Rule, Scope, define
from ptxflow.compiler.atoms.threads import OF_ONE, pieces
from ptxflow.compiler.ir import UOp

FINE = 22  # bits of the low word of a fine mass
_SCALE, _ONE, _HALF_MORE = "0f4A800000", "0f4B000000", "0f4B400000"  # 2^22, 2^23, 3 2^22
_PHILOX = ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))  # multipliers, key increments


def _fine(x: str, high: str, low: str) -> list[str]:
    """Adds the fine mass of x, biased by _ONE and _HALF_MORE, to two words.

    x 2^22 is rounded to an integer by adding 2^23; what that leaves is exact, and rounded alike.
    """
    return [
        f"fma.rn.f32 %_h, {x}, {_SCALE}, {_ONE};",
        f"add.u32 {high}, {high}, %_h;",
        f"sub.f32 %_h, {_ONE}, %_h;",
        f"fma.rn.f32 %_h, {x}, {_SCALE}, %_h;",
        f"fma.rn.f32 %_h, %_h, {_SCALE}, {_HALF_MORE};",
        f"add.u32 {low}, {low}, %_h;",
    ]


def _unbias(count: int, high: str, low: str) -> list[str]:
    return [
        f"sub.u32 {high}, {high}, {count * 0x4B000000 & 0xFFFFFFFF};",
        f"sub.u32 {low}, {low}, {count * 0x4B400000 & 0xFFFFFFFF};",
    ]


def _whole(high: str, low: str, to: str) -> list[str]:
    """A fine mass in one 64-bit register, from its words (low signed)."""
    return [
        f"cvt.u64.u32 {to}, {high};",
        f"shl.b64 {to}, {to}, {FINE};",
        f"cvt.s64.s32 %_w, {low};",
        f"add.u64 {to}, {to}, %_w;",
    ]


def _tie_mass(key: str) -> list[str]:
    """%_tie: the fine mass of a key."""
    return [
        "mov.b32 %_hi, 0;",
        "mov.b32 %_lo, 0;",
        *_fine(key, "%_hi", "%_lo"),
        *_unbias(1, "%_hi", "%_lo"),
        *_whole("%_hi", "%_lo", "%_tie"),
    ]


def _masses_text(use: UOp, text: dict[str, str]) -> str:
    high, low, ties = pieces(text["dst"])
    begun = text["accumulate"]
    guard = "" if begun == "0" else f"@!{begun} "
    lines = [] if begun == "1" else [f"{guard}mov.b32 {d}, 0;" for d in (high, low, ties)]
    groups = voted(use, pieces(text["src"]))
    for i, group in enumerate(groups):
        reach = [f"%_p{j}" for j in range(len(group))]
        lines += [
            f"setp.ge.u32 {p}, {x}, {text['key']};" for p, x in zip(reach, group, strict=True)
        ]
        if use.arg.attr("group"):
            lines += skip_where_none(reach, f"NONE{i}")
        for p, x in zip(reach, group, strict=True):
            lines += [
                f"setp.eq.u32 %_q, {x}, {text['key']};",
                f"@%_q add.u32 {ties}, {ties}, 1;",
                f"setp.gt.and.u32 %_q, {x}, {text['key']}, {p};",
                f"selp.b32 %_x, {x}, 0, %_q;",
                *_fine("%_x", high, low),
            ]
        lines += _unbias(len(group), high, low)
        if use.arg.attr("group"):
            lines += [f"NONE{i}:"]
    return scoped(f"b32 h x, pred some q p<{len(groups[0])}>", lines)


masses = define(
    Atom(
        "masses",
        (("dst", "frag"), ("src", "frag"), ("key", "frag"), ("accumulate", "value")),
        Scope.WARP,
        Lanes.ALL,
        _masses_text,
        "9.7.3.7 fma: the fine mass of a thread's elements above a key (high, low), and how many "
        "are equal to it; begun anew or gone on with",
        accesses=(
            Access("src", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("dst", "rw", GENERIC),
        ),
        defaults=(("group", 0),),
        rules=(Rule("it gives two words and a count", lambda u: u.src[0].arg == 3),),
    )
)
_WARP_MASS_TEMPS = "b32 a, b64 q w"


def _warp_masses_text(use: UOp, text: dict[str, str]) -> str:
    high, low, ties = pieces(text["src"])
    to_high, to_low, to_ties, unused = pieces(text["dst"])
    return scoped(_WARP_MASS_TEMPS, [
        *_whole(high, low, "%_q"),
        *_words_sum("%_q", to_high, to_low),
        f"redux.sync.add.u32 {to_ties}, {ties}, {ALL_LANES};",
        f"mov.b32 {unused}, 0;",
    ])  # fmt: skip


def _words_sum(mass: str, high: str, low: str) -> list[str]:
    """The sum over lanes of 64-bit fine masses: of their words, which do not overflow."""
    return [
        f"cvt.u32.u64 %_a, {mass};",
        f"and.b32 %_a, %_a, {(1 << FINE) - 1};",
        f"redux.sync.add.u32 {low}, %_a, {ALL_LANES};",
        f"shr.u64 {mass}, {mass}, {FINE};",
        f"cvt.u32.u64 %_a, {mass};",
        f"redux.sync.add.u32 {high}, %_a, {ALL_LANES};",
    ]


warp_masses = define(
    Atom(
        "warp_masses",
        (("dst", "frag"), ("src", "frag")),
        Scope.WARP,
        Lanes.ALL,
        _warp_masses_text,
        "9.7.13.11 redux.sync: fine masses and counts of ties, summed over the lanes; a share: "
        "high, low, ties, 0",
        accesses=OF_ONE,
        sass=("redux.sync",),
        rules=(Rule("a share of two words and a count", lambda u: (
            u.src[0].arg, u.src[1].arg) == (4, 3)),),
    )
)  # fmt: skip


def _kept(ties: str, before: str, allowed: str) -> list[str]:
    """%_k: how many of these ties are kept, after those before them."""
    return [
        f"min.u32 %_k, {before}, {allowed};",
        f"sub.u32 %_k, {allowed}, %_k;",
        f"min.u32 %_k, %_k, {ties};",
    ]


def _share_mass(high: str, low: str, to: str) -> list[str]:
    """A share's mass: its words (low unsigned) and %_k ties."""
    return [
        f"cvt.u64.u32 {to}, {high};",
        f"shl.b64 {to}, {to}, {FINE};",
        f"cvt.u64.u32 %_w, {low};",
        f"add.u64 {to}, {to}, %_w;",
        "cvt.u64.u32 %_w, %_k;",
        "mul.lo.u64 %_w, %_w, %_tie;",
        f"add.u64 {to}, {to}, %_w;",
    ]


def _enter(state: str, start: str, mass: str) -> list[str]:
    """The state of the search from where a share starts: %_q says whether the target is in it."""
    active, low, high, left = pieces(state)
    return [
        f"setp.ge.u64 %_q, %_target, {start};",
        f"sub.u64 %_w, %_target, {start};",
        f"setp.lt.and.u64 %_q, %_w, {mass}, %_q;",
        f"selp.u32 {active}, 1, 0, %_q;",
        f"mov.b64 {{{low}, {high}}}, %_w;",
        f"mov.b32 {left}, %_left;",
    ]


def _cta_target_text(use: UOp, text: dict[str, str]) -> str:
    """Shares by rank; a share's ties are those before its own that the allowance leaves."""
    shares = pieces(text["shares"])
    low, high = pieces(text["uniform"])
    lines = [*_tie_mass(text["key"]), "mov.b64 %_sum, 0;", "mov.b32 %_before, 0;"]
    lines += ["mov.b64 %_start, 0;", "mov.b64 %_mine, 0;", "mov.b32 %_left, 0;"]
    for i in range(0, len(shares), 4):
        words_high, words_low, ties = shares[i : i + 3]
        lines += [
            f"setp.eq.u32 %_q, {text['rank']}, {i // 4};"
            if len(shares) > 4
            else "mov.pred %_q, 1;",
            *_kept(ties, "%_before", text["ties"]),
            *_share_mass(words_high, words_low, "%_mass"),
            "@%_q mov.b64 %_start, %_sum;",
            "@%_q mov.b64 %_mine, %_mass;",
            f"min.u32 %_k, %_before, {text['ties']};",
            f"sub.u32 %_k, {text['ties']}, %_k;",
            "@%_q mov.b32 %_left, %_k;",
            "add.u64 %_sum, %_sum, %_mass;",
            f"add.u32 %_before, %_before, {ties};",
        ]
    lines += [f"mov.b64 %_target, {{{low}, {high}}};", "mul.hi.u64 %_target, %_target, %_sum;"]
    lines += _enter(text["dst"], start="%_start", mass="%_mine")
    temps = "b32 h hi lo k before left, b64 tie w sum start mine mass target, pred q"
    return scoped(temps, lines)


_STATE = Rule("the state is four registers", lambda u: u.src[0].arg == 4)
cta_target = define(
    Atom(
        "cta_target",
        (
            ("dst", "frag"),
            ("shares", "frag"),
            ("key", "frag"),
            ("ties", "frag"),
            ("uniform", "frag"),
            ("rank", "value"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        _cta_target_text,
        "9.7.1 mul.hi: where a uniform number of 64 bits falls among the CTAs' kept masses: "
        "whether here, how far into it, and how many ties are kept from here on",
        accesses=(
            Access("shares", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("ties", "r", GENERIC),
            Access("uniform", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        rules=(_STATE, Rule("four words a share", lambda u: u.src[1].arg % 4 == 0)),
    )
)


def _scan(value: str, width: int) -> list[str]:
    """An inclusive sum over the lanes, in place; %_p and %_ua, %_ub, %_u are clobbered."""
    lines = []
    for step in (1, 2, 4, 8, 16):
        if width == 32:
            lines += [
                f"shfl.sync.up.b32 %_ua|%_p, {value}, {step}, 0, {ALL_LANES};",
                f"@%_p add.u32 {value}, {value}, %_ua;",
            ]
        else:
            lines += [
                f"mov.b64 {{%_ua, %_ub}}, {value};",
                f"shfl.sync.up.b32 %_ua|%_p, %_ua, {step}, 0, {ALL_LANES};",
                f"shfl.sync.up.b32 %_ub|%_p, %_ub, {step}, 0, {ALL_LANES};",
                "mov.b64 %_u, {%_ua, %_ub};",
                f"@%_p add.u64 {value}, {value}, %_u;",
            ]
    return lines


def _of_lane(value: str, lane: str) -> list[str]:
    return [
        f"mov.b64 {{%_ua, %_ub}}, {value};",
        f"shfl.sync.idx.b32 %_ua, %_ua, {lane}, 31, {ALL_LANES};",
        f"shfl.sync.idx.b32 %_ub, %_ub, {lane}, 31, {ALL_LANES};",
        f"mov.b64 {value}, {{%_ua, %_ub}};",
    ]


def _warp_target_text(use: UOp, text: dict[str, str]) -> str:
    """Lane i holds the share of warp i, and nothing where there is no such warp."""
    active, low, high, left = pieces(text["src"])
    words_high, words_low, ties, _ = pieces(text["share"])
    warp = text["index"]
    lines = [
        *_tie_mass(text["key"]),
        f"mov.b32 %_before, {ties};",
        *_scan("%_before", 32),
        f"sub.u32 %_before, %_before, {ties};",
        *_kept(ties, "%_before", left),
        *_share_mass(words_high, words_low, "%_mass"),
        "mov.b64 %_start, %_mass;",
        *_scan("%_start", 64),
        "sub.u64 %_start, %_start, %_mass;",
        f"min.u32 %_before, %_before, {left};",
        f"sub.u32 %_before, {left}, %_before;",
        f"shfl.sync.idx.b32 %_left, %_before, {warp}, 31, {ALL_LANES};",
        *_of_lane("%_mass", warp),
        *_of_lane("%_start", warp),
        f"mov.b64 %_target, {{{low}, {high}}};",
        *_enter(text["dst"], start="%_start", mass="%_mass"),
        f"mul.lo.u32 {pieces(text['dst'])[0]}, {pieces(text['dst'])[0]}, {active};",
    ]
    temps = "b32 h hi lo k before left ua ub, b64 tie w u mass start target, pred p q"
    return scoped(temps, lines)


warp_target = define(
    Atom(
        "warp_target",
        (
            ("dst", "frag"),
            ("src", "frag"),
            ("share", "frag"),
            ("key", "frag"),
            ("index", "value"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _warp_target_text,
        "9.7.9.6 shfl.sync: as cta_target, from the CTA's share to the warps'",
        accesses=(
            Access("src", "r", GENERIC),
            Access("share", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        rules=(_STATE, Rule("four words a share", lambda u: u.src[2].arg == 4)),
    )
)


def _search_text(use: UOp, text: dict[str, str]) -> str:
    """Vector by vector, and within one lane by lane; a warp without the target leaves at once."""
    found, index, *state = pieces(text["dst"])
    active, low, high, left = state
    width, step = use.arg.attr("vector"), use.arg.attr("step")
    row = pieces(text["src"])
    begun = text["accumulate"]
    guard = "" if begun == "0" else f"@!{begun} "
    anew = [(found, "0"), (index, "0"), *zip(state, pieces(text["state"]), strict=True)]
    lines = [] if begun == "1" else [f"{guard}mov.b32 {d}, {s};" for d, s in anew]
    lines += [
        f"setp.eq.u32 %_q, {active}, 0;",
        "@%_q bra END;",
        f"mov.b64 %_target, {{{low}, {high}}};",
        "shl.b32 %_below, 1, %lane;",
        "sub.u32 %_below, %_below, 1;",
    ]
    for v in range(len(row) // width):
        lines += _search_vector(row[v * width : (v + 1) * width], text, v, v * step, left)
    lines += [f"mov.b64 {{{low}, {high}}}, %_target;", "bra END;", "HIT:"]
    lines += _search_lane(width, found, index, text["first"])
    lines += [f"mov.b32 {active}, 0;", "END:"]
    temps = (
        f"b32 h hi lo a b rank ties below at ua ub x<{width}>, "
        "b64 w u sum mass start target, pred p q"
    )
    return scoped(temps, lines)


def _search_vector(
    group: list[str], text: dict[str, str], v: int, offset: int, left: str
) -> list[str]:
    """Go to HIT with the kept elements of the vector that holds the target, or past it."""
    key, n = text["key"], len(group)
    lines = ["mov.b32 %_rank, 0;", "mov.b32 %_ties, 0;"]
    for x in group:  # ties of lower lanes, and of all
        lines += [
            f"setp.eq.u32 %_q, {x}, {key};",
            f"vote.sync.ballot.b32 %_a, %_q, {ALL_LANES};",
            "popc.b32 %_b, %_a;",
            "add.u32 %_ties, %_ties, %_b;",
            "and.b32 %_a, %_a, %_below;",
            "popc.b32 %_b, %_a;",
            "add.u32 %_rank, %_rank, %_b;",
        ]
    lines += ["mov.b32 %_hi, 0;", "mov.b32 %_lo, 0;"]
    for j, x in enumerate(group):
        lines += [
            f"setp.lt.u32 %_p, %_rank, {left};",
            f"setp.eq.and.u32 %_q, {x}, {key}, %_p;",
            f"setp.eq.u32 %_p, {x}, {key};",
            "@%_p add.u32 %_rank, %_rank, 1;",
            f"setp.gt.or.u32 %_q, {x}, {key}, %_q;",
            f"selp.b32 %_x{j}, {x}, 0, %_q;",
            *_fine(f"%_x{j}", "%_hi", "%_lo"),
        ]
    return [
        *lines,
        *_unbias(n, "%_hi", "%_lo"),
        *_whole("%_hi", "%_lo", "%_mass"),
        "mov.b64 %_w, %_mass;",
        *_words_sum("%_w", "%_ua", "%_ub"),
        "cvt.u64.u32 %_sum, %_ua;",
        f"shl.b64 %_sum, %_sum, {FINE};",
        "cvt.u64.u32 %_w, %_ub;",
        "add.u64 %_sum, %_sum, %_w;",
        f"mov.b32 %_at, {offset};",
        "setp.lt.u64 %_q, %_target, %_sum;",
        "@%_q bra HIT;",
        "sub.u64 %_target, %_target, %_sum;",
        f"min.u32 %_ties, %_ties, {left};",
        f"sub.u32 {left}, {left}, %_ties;",
    ]


def _search_lane(width: int, found: str, index: str, first: str) -> list[str]:
    """The lane whose kept elements hold the target, and which of them."""
    lines = [
        "mov.b64 %_start, %_mass;",
        *_scan("%_start", 64),
        "sub.u64 %_start, %_start, %_mass;",
        "setp.ge.u64 %_p, %_target, %_start;",
        "sub.u64 %_target, %_target, %_start;",
        "setp.lt.and.u64 %_p, %_target, %_mass, %_p;",
        f"selp.u32 {found}, 1, 0, %_p;",
        f"add.u32 {index}, {first}, %_at;",
    ]
    for j in range(width - 1):  # past the elements that end before it
        lines += [
            "mov.b32 %_hi, 0;",
            "mov.b32 %_lo, 0;",
            *_fine(f"%_x{j}", "%_hi", "%_lo"),
            *_unbias(1, "%_hi", "%_lo"),
            *_whole("%_hi", "%_lo", "%_mass"),
            "setp.ge.and.u64 %_p, %_target, %_mass, %_p;"
            if j
            else "setp.ge.u64 %_p, %_target, %_mass;",
            f"@%_p add.u32 {index}, {index}, 1;",
            "@%_p sub.u64 %_target, %_target, %_mass;",
        ]
    return lines


search = define(
    Atom(
        "search",
        (
            ("dst", "frag"),
            ("state", "frag"),
            ("src", "frag"),
            ("key", "frag"),
            ("first", "value"),
            ("accumulate", "value"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _search_text,
        "9.7.9.6 shfl.sync, 9.7.13.9 vote.sync: the element that holds the target, in the order of "
        "vectors, lanes and elements: 1 in its lane, its index from `first` on, and the state",
        accesses=(
            Access("src", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("state", "r", GENERIC),
            Access("dst", "rw", GENERIC),
        ),
        rules=(
            Rule("it gives a flag, an index and the state", lambda u: u.src[0].arg == 6),
            Rule("the state is four registers", lambda u: u.src[1].arg == 4),
            Rule("whole vectors", lambda u: u.src[2].arg % u.arg.attr("vector") == 0),
        ),
    )
)


def _philox_text(use: UOp, text: dict[str, str]) -> str:
    (m0, m1), (w0, w1) = _PHILOX
    names = ("offset_low", "offset_high", "row")
    lines = [f"mov.b32 %_c{i}, {text[name]};" for i, name in enumerate(names)]
    lines += ["mov.b32 %_c3, 0;"]
    lines += [f"mov.b32 %_k{i}, {text[name]};" for i, name in enumerate(("seed_low", "seed_high"))]
    for i in range(10):
        if i:
            lines += [f"add.u32 %_k0, %_k0, {w0};", f"add.u32 %_k1, %_k1, {w1};"]
        lines += [
            f"mul.hi.u32 %_h0, %_c0, {m0};",
            f"mul.lo.u32 %_l0, %_c0, {m0};",
            f"mul.hi.u32 %_h1, %_c2, {m1};",
            f"mul.lo.u32 %_l1, %_c2, {m1};",
            "xor.b32 %_c0, %_h1, %_c1;",
            "xor.b32 %_c0, %_c0, %_k0;",
            "xor.b32 %_c2, %_h0, %_c3;",
            "xor.b32 %_c2, %_c2, %_k1;",
            "mov.b32 %_c1, %_l1;",
            "mov.b32 %_c3, %_l0;",
        ]
    lines += [f"mov.b32 {d}, %_c{i};" for i, d in enumerate(pieces(text["dst"]))]
    return scoped("b32 c<4> k<2> h<2> l<2>", lines)


philox = define(
    Atom(
        "philox",
        (
            ("dst", "frag"),
            ("seed_low", "value"),
            ("seed_high", "value"),
            ("offset_low", "value"),
            ("offset_high", "value"),
            ("row", "value"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        _philox_text,
        "9.7.1 mul.hi, mul.lo: Philox4x32-10 (Salmon et al., SC 2011) of the counter (offset, row, "
        "0) under the seed: its first words, the lower first",
        accesses=(Access("dst", "w", GENERIC),),
        rules=(Rule("it gives up to four words", lambda u: 1 <= u.src[0].arg <= 4),),
    )
)
