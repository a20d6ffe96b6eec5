"""What families ask of a definition's tensors: names, shapes, a 16-bit dtype that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxflow.compiler.family import bind_axis

#: the 16-bit floats that kernels multiply and read rows of, and what PTX calls them
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}

Shapes = Mapping[str, Sequence[str] | None]  # axes of each tensor; a scalar has None


@dataclass(frozen=True)
class Tensors:
    """The inputs and outputs that a definition must have, all of them and no others.

    `what` and `sharing` are words of messages: what such a definition is of, and which tensors
    share a 16-bit dtype. These are all but `others`, which have dtypes of their own; others may
    name tensors that are not there.
    """

    what: str
    inputs: Shapes
    outputs: Shapes
    sharing: str = "its tensors"
    others: Mapping[str, str] = field(default_factory=dict)

    def dtype(self, name: str, definition: Mapping[str, Any]) -> str:
        """The shared dtype of a definition, whose name begins messages.

        Raises ValueError, one line, for other tensors, shapes and dtypes.
        """
        found = set()
        for section, expected in (("inputs", self.inputs), ("outputs", self.outputs)):
            tensors: Mapping[str, Any] = definition.get(section) or {}
            shapes = {tensor: spec["shape"] for tensor, spec in tensors.items()}
            if shapes != expected:
                raise ValueError(f"{name}: {self.what} has the {section} {expected}, not {shapes}")
            for tensor, spec in tensors.items():
                wanted = self.others.get(tensor)
                if wanted is None:
                    found.add(str(spec["dtype"]))
                elif spec["dtype"] != wanted:
                    raise ValueError(f"{name}: {tensor} must be {wanted}, not {spec['dtype']}")
        if len(found) != 1 or not found <= set(PTX_TYPE):
            raise ValueError(
                f"{name}: {self.sharing} must share one dtype of {', '.join(PTX_TYPE)}, not "
                f"{', '.join(sorted(found))}"
            )
        return found.pop()

    def axes(
        self, name: str, definition: Mapping[str, Any], given: Mapping[str, int]
    ) -> dict[str, int]:
        """Every axis of the shapes, in the order in which they name them: see `bind_axis`."""
        shapes = (*self.inputs.values(), *self.outputs.values())
        names = dict.fromkeys(axis for shape in shapes for axis in shape or ())
        return {axis: bind_axis(name, axis, definition["axes"], given) for axis in names}
