"""What the emulator refuses: `Fault` stops a run. (A hazard it notes is a line of text.)

A fault names the thread, the PTX line and its text, the rule and the facts.
"""


class Fault(Exception):
    """The PTX text cannot be run further: unknown instruction, bad access, deadlock, leak."""


class Endless(Fault):
    """A run was stopped at its limit of instructions: it says nothing of what would follow."""


class PtxSyntaxError(Fault):
    """The text is not the PTX that this emulator knows."""
