"""The ends of filters: goals, prefixes, windows and ties, the same in every lane.

What was *found* is two registers: a digit and 1 (0: nothing, the filter keeps all), and what is
left of the goal there. The *prefix* of a key is what is known of it.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.reductions import KEY_BITS, LEAST
from ptxflow.compiler.ir import Value, alu
from ptxflow.compiler.tile.values import UInt32, emit

ACTIVE = "active"  # a register, which the trip classes say
MANY = 0x7FFFFFFF  # a count that no row reaches
EVERYTHING = 0xFFFFFFFF  # a weight that no row exceeds
NOWHERE = 0xFFFFFFFF  # the prefix of a threshold that there is not
ONE, INFINITY = 0x3F800000, 0x7F800000  # bits
WHOLE = 1 << 31  # the weight of probability 1
FLOOR = LEAST - 1  # a threshold below all that weighs something


def is_active(k: UInt32, most: int) -> UInt32:
    """1 where k filters, from 1 to `most`, else 0."""
    active = k.registers.uint32(name=ACTIVE)
    emit(at.either(active, 1, 0, k.value - 1 < most))
    return active


def goal_of_k(k: UInt32) -> UInt32:
    """k - 1, or MANY where k keeps everything."""
    return k.registers.uint32((k.value - 1).min(MANY))


def goal_of_p(p: UInt32, total: Value) -> UInt32:
    """floor(p total), p in steps of 2^-31; 0 for p <= 0, EVERYTHING from 1 on."""
    share = p.registers.of(at.weigh, p, rounding="rzi").value
    floor = (alu("mulhi", share, total) << 1) | ((share * total) >> 31)
    return p.registers.either(p.value - ONE < INFINITY - ONE + 1, EVERYTHING, floor)


def whole_kept(total: UInt32, key: UInt32, ties: UInt32) -> Value:
    """The mass above a threshold, and that of its ties."""
    return weight(key) * ties.value + total.value


def weight(key: UInt32) -> Value:
    """Of an element."""
    return key.registers.of(at.weigh, key).value


def _digit(found: UInt32) -> Value:
    return found.registers.of(at.copy, found[0]).value


def left(found: UInt32) -> Value:
    """Of the goal, where it was found."""
    return found.registers.of(at.copy, found[1]).value


def first_digit(found: UInt32) -> UInt32:
    """The prefix of one digit; NOWHERE where none was found."""
    return found.registers.uint32(_digit(found) - 1)


def narrow(prefix: UInt32, found: UInt32, bits: int) -> UInt32:
    """The prefix with the digit that was found, NOWHERE where none was."""
    return found.registers.uint32((prefix.value << bits) | (_digit(found) - 1))


def key_of(prefix: UInt32) -> UInt32:
    """The element of a whole key; FLOOR where there is none."""
    there = prefix.value.ne(NOWHERE)
    return prefix.registers.either(there, prefix.value + LEAST, FLOOR)


def prefer(prefix: UInt32, inner: UInt32, outer: UInt32) -> UInt32:
    """The inner threshold's, or the outer's where there is no inner one."""
    return prefix.registers.either(prefix.value.ne(NOWHERE), inner.value, outer.value)


def window(found: UInt32, bits: int, uncertain: Value | None) -> UInt32:
    """The elements of the bin that was found; LEAST twice where none was. What is kept for certain
    begins at the first register, what may be at the second; where that is uncertain nothing is.
    """
    r, digit, shift = found.registers, _digit(found), KEY_BITS - bits
    low = ((digit - 1) << shift) + LEAST
    ends = [r.either(digit.ne(0), end, LEAST).value for end in (low + (1 << shift), low)]
    if uncertain is not None:
        ends[0] = r.either(uncertain, EVERYTHING, ends[0]).value
    return r.together(ends)


def ties_of_count(found: UInt32) -> UInt32:
    """Ties that are kept: one more than what the goal left; MANY where k keeps all."""
    return found.registers.either(_digit(found).ne(0), left(found) + 1, MANY)


def ties_of_mass(found: UInt32, key: UInt32) -> UInt32:
    """Ties that are kept, until their weights pass what the goal left; MANY for all."""
    return found.registers.either(_digit(found).ne(0), _until(left(found), key), MANY)


def ties_of_rest(ties: UInt32, total: UInt32, goal: UInt32, key: UInt32) -> UInt32:
    """Of the ties at a threshold as many as bring what is above it above the goal."""
    return key.registers.uint32(_until(goal.value - total.value, key).min(ties.value))


def _until(goal: Value, key: UInt32) -> Value:
    """As many elements equal to a key as bring their weights, 1 at least, above a goal."""
    each = weight(key)
    return (goal // (each + each.eq(0))).min(MANY - 1) + 1
