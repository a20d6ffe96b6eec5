"""What the compiler refuses, and why: every refusal is one class with one clear message."""


class CompileError(Exception):
    """A kernel was refused. The message says who, where, which rule, which facts, what fixes it."""


class IllegalStrategy(CompileError):
    """The family's rules refuse the strategy for this problem and device."""


class SpecError(CompileError):
    """A static rule of the IR or of an atom is broken."""


class HazardError(CompileError):
    """Abstract execution found a hazard: race, deadlock, unwritten read, leak, work in flight."""


class AssemblyError(CompileError):
    """ptxas assembled the kernel but not as the strategy claims (spills, C75xx notes, SASS)."""
