"""The sizes that a library serves: ranges of the variable axes, and the places at which to look.

A definition's axes are free, tied to a free one (`len_indptr == batch_size + 1`), or a cache's
capacity (`num_pages` beside indices of pages), which no kernel's time depends on. Ranges and
dispatch are of free axes.
"""

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ptxflow.env.tasks.arguments import UsageError, parse_axes, product
from ptxflow.env.tasks.definition import Definition, DefinitionError, names
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.sample.selection import trained_ranges

Range = tuple[int, int]
Sizes = dict[str, int]
LENGTHS = ("num_kv_indices", "total_q", "total_kv", "total_seq_len")
CAPACITY = "num_pages"


@dataclass(frozen=True)
class Ranges:
    """What a library serves: low and high, both included, of each free axis.

    tied      axis -> the free axis that it follows, and how much more it is
    capacity  where the definition has one, the range asked for it, or None
    """

    definition: Definition
    free: Mapping[str, Range]
    tied: Mapping[str, tuple[str, int]]
    capacity: Range | None = None

    def axes(self, sizes: Mapping[str, int]) -> Sizes:
        """Every variable axis, from sizes of the free ones."""
        known = dict(sizes) | {n: sizes[of] + more for n, (of, more) in self.tied.items()}
        for name in self.definition.var_axes:
            if name not in known:  # a cache with a quarter more pages than are in use
                pages = known.get("num_kv_indices") or known["batch_size"] * known["max_num_pages"]
                low, high = self.capacity or (1, 1 << 31)
                known[name] = min(max(pages + pages // 4 + 16, low), high)
        return {name: known[name] for name in self.definition.var_axes}

    @property
    def ends(self) -> list[Sizes]:
        """Every variable axis where all free ones are least, and where they are largest."""
        return [self.axes({n: r[i] for n, r in self.free.items()}) for i in (0, 1)]

    def hold(self, axes: Mapping[str, int]) -> bool:
        """Whether free axes are within what is served."""
        return all(low <= axes[n] <= high for n, (low, high) in self.free.items())

    def draw(self, rng: np.random.Generator) -> Sizes:
        """Sizes of the free axes, uniform over their octaves."""
        spans = {n: (math.log(low), math.log(high + 1)) for n, (low, high) in self.free.items()}
        sizes = {n: int(math.exp(rng.uniform(*span))) for n, span in spans.items()}
        return {n: min(max(v, self.free[n][0]), self.free[n][1]) for n, v in sizes.items()}

    def patterns(self, sizes: Mapping[str, int]) -> list[Sizes]:
        """The sizes, and others next to them of which workloads have other lengths: even,
        exponential, one long among many short, uniform (see env/tasks/sequences.py)."""
        parts = self.axes(sizes).get("len_indptr", self.axes(sizes).get("len_cu_seqlens", 2)) - 1
        found = []
        for rest in range(min(4, parts)):
            total = {
                n: max(low, min(high, sizes[n] - sizes[n] % parts + rest))
                for n, (low, high) in self.free.items()
                if n in LENGTHS
            }
            found.append({**sizes, **total})
        return [dict(row) for row in dict.fromkeys(tuple(f.items()) for f in found)]

    @property
    def served(self) -> dict[str, Range]:
        """The ranges as a manifest has them: tied axes too, a capacity only where it was asked."""
        tied = {
            n: (self.free[of][0] + more, self.free[of][1] + more)
            for n, (of, more) in self.tied.items()
        }
        asked = {CAPACITY: self.capacity} if self.capacity else {}
        return {**self.free, **tied, **asked}

    def __str__(self) -> str:
        return " ".join(f"{n}={low}:{high}" for n, (low, high) in self.free.items())


def find_ranges(definition: Definition, texts: Sequence[str]) -> tuple[Ranges, str]:
    """The ranges asked for, and a line about those that were not; UsageError, one line, for an
    axis that is unknown or constant, and for a range that is none."""
    asked = parse_ranges(definition, texts)
    tied = _ties(definition)
    for name, (of, more) in tied.items():
        if name in asked:
            low, high = asked.pop(name)
            follows = low - more, high - more
            if asked.setdefault(of, follows) != follows or follows[0] < 1:
                raise UsageError(f"axis {name!r} is {of} + {more}: give {of!r} alone")
    used = {"num_kv_indices", "max_num_pages"} & set(definition.var_axes)
    free = [n for n in definition.var_axes if n not in tied and not (used and n == CAPACITY)]
    usual = default_ranges(definition) if any(n not in asked for n in free) else {}
    if missing := [n for n in free if n not in asked and n not in usual]:
        raise UsageError(
            f"{definition.name}: no range is given for {', '.join(missing)}; such as "
            f"--axes {missing[0]}=1:1024"
        )
    taken = {n: usual[n] for n in free if n not in asked}
    remark = " ".join(f"{n}={low}:{high}" for n, (low, high) in taken.items())
    ranges = Ranges(definition, {n: asked.get(n, taken.get(n, (1, 1))) for n in free}, tied,
                    asked.get(CAPACITY) if used else None)  # fmt: skip
    ranges.definition.bind(ranges.axes({n: low for n, (low, _) in ranges.free.items()}))
    where = "the range of its training and its workloads"
    return ranges, f"--axes not given: taking {remark}, {where}" if remark else ""


def parse_ranges(definition: Definition, texts: Iterable[str]) -> dict[str, Range]:
    """`["M=1:16384", "L=7"]` to `{"M": (1, 16384), "L": (7, 7)}`."""
    found: dict[str, Range] = {}
    for text in texts:
        name, _, values = text.partition("=")
        low, sign, high = values.partition(":")
        ends = [parse_axes([f"{name}={v}"])[name] for v in ([low, high] if sign else [values])]
        if any(len(e) > 1 for e in ends):
            raise UsageError(f"axis {text!r} must be a range, as {name}=1:16384, or one value")
        if name in found:
            raise UsageError(f"axis {name!r} is given twice")
        found[name] = ends[0][0], ends[-1][0]
        if found[name][0] > found[name][1]:
            raise UsageError(f"axis {text!r}: the range ends before it begins")
        if name not in definition.axes:
            raise DefinitionError(
                f"{definition.name}: unknown axis {name!r}; the variable axes are "
                f"{', '.join(definition.var_axes)}"
            )
        if name in definition.const_axes:
            raise UsageError(
                f"{definition.name}: axis {name!r} is the constant "
                f"{definition.const_axes[name]}, and has no range"
            )
    return found


def default_ranges(definition: Definition) -> dict[str, Range]:
    """From where to where each variable axis is trained, or recorded in a workload."""
    found = trained_ranges([definition])
    if definition.name in names():
        for row in workloads(definition.name):
            for axis, value in row.axes.items() if row.refusal is None else ():
                low, high = found.get(axis, (value, value))
                found[axis] = min(low, value), max(high, value)
    return found


def _ties(definition: Definition) -> dict[str, tuple[str, int]]:
    """Which variable axis follows which: by an equality, or as the ends of sequences follow their
    number."""
    axes, found = definition.var_axes, dict[str, tuple[str, int]]()
    for text in [*definition.constraints, "len_indptr == batch_size + 1"]:
        match ast.parse(text, mode="eval").body:
            case ast.Compare(
                left=ast.Name(id=name),
                ops=[ast.Eq()],
                comparators=[ast.BinOp(ast.Name(id=of), ast.Add(), ast.Constant(value=int(more)))],
            ) if name in axes and of in axes:
                found.setdefault(name, (of, more))
    return found


def spaced(low: int, high: int, parts: int, widest: int) -> list[int]:
    """Whole numbers from low to high: `parts` an octave, no further apart than `widest`, each a
    multiple of the distance there, so that powers of two and multiples of tiles are among them."""
    found, value = [low], low
    while value < high:
        step = min(max(1, (1 << value.bit_length() - 1) // parts), widest)
        value = min(high, value - value % step + step)
        found.append(value)
    return found


def looks(ranges: Ranges, most: int) -> list[Sizes]:
    """At most `most` sizes, spread evenly over the octaves of each axis, with its ends."""
    return product({n: _octaves(*r, share) for n, r, share in _shares(ranges, most)})


def between(ranges: Ranges, most: int) -> list[Sizes]:
    """Sizes at which candidates alone are scored: closer than looks, where sizes are large too."""
    found = {}
    for name, (low, high), share in _shares(ranges, most):
        even = spaced(low, high, 8, 1 << max(0, high.bit_length() - 5))
        found[name] = even if len(even) <= share else _octaves(low, high, share)
    return product(found)


def bounds(ranges: Ranges, most: int, looked: Sequence[Sizes] = ()) -> dict[str, list[int]]:
    """Upper ends of cells, at most `most` in all besides those at the sizes `looked` at: where
    sizes are large, of equal widths, since kernels change there by tiles and waves."""
    found = {}
    for name, (low, high), share in _shares(ranges, most):
        widths = [1 << e for e in range(6, high.bit_length() + 1)]
        fine = (spaced(low, high, 8, w) for w in widths)
        ends = next((f for f in fine if len(f) <= share), _octaves(low, high, share))
        found[name] = sorted({*ends, *(sizes[name] for sizes in looked)})
    return found


def _shares(ranges: Ranges, most: int) -> list[tuple[str, Range, int]]:
    """Each free axis, its range, and how many places it may have."""
    wide = [n for n, (low, high) in ranges.free.items() if low < high]
    each = int(most ** (1 / max(1, len(wide))) + 1e-9)
    return [(n, r, each if n in wide else 1) for n, r in ranges.free.items()]


def _octaves(low: int, high: int, most: int) -> list[int]:
    for parts in (4, 2, 1):
        if len(found := spaced(low, high, parts, high)) <= most:
            return found
    return sorted({round(v) for v in np.geomspace(low, high, max(2, most))})
