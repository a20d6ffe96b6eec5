"""The workloads of the definitions: which axes they are run at, public rows and rows of our own.

One JSON line per workload, in env/tasks/workloads/<op_type>/<definition>.jsonl, in the form of a
FlashInfer-Bench workload trace. Public rows are kept as recorded; tensors they mark `recorded` were
files that did not travel with them, and `inputs.make_inputs` draws valid ones for the same axes.
Rows of ours have the source `ptxflow`; tensors that must be valid are marked `generated`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxflow.env.tasks.definition import DefinitionError, load, names

FOLDER = Path(__file__).resolve().parent / "workloads"
OURS = "ptxflow"


@dataclass(frozen=True)
class Workload:
    """One row: values of the variable axes, and of scalar inputs where the row fixes them."""

    definition: str
    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    source: str
    live_query_rows: int | None = None  # queries that saw a key when it was recorded, where known

    @property
    def public(self) -> bool:
        """Whether it is recorded elsewhere, and not a row of ours."""
        return self.source != OURS

    @property
    def scalars(self) -> dict[str, float]:
        """Scalar inputs of the row, for `make_inputs`."""
        return {n: spec["value"] for n, spec in self.inputs.items() if spec["type"] == "scalar"}

    @property
    def degenerate(self) -> bool:
        """See the function of that name."""
        return degenerate(self.definition, self.axes)

    @property
    def refusal(self) -> str | None:
        """Why no inputs have these axes (a public row has a cache without pages), or None."""
        try:
            load(self.definition).bind(self.axes)
        except DefinitionError as error:
            return str(error)
        return None

    def to_json(self) -> dict[str, Any]:
        """A line of a FlashInfer-Bench workload trace."""
        workload = {"axes": dict(self.axes), "inputs": dict(self.inputs), "uuid": self.uuid}
        row = {"definition": self.definition, "workload": workload, "source": self.source}
        live = self.live_query_rows
        return row if live is None else row | {"live_query_rows": live}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> "Workload":
        """KeyError where a key is missing."""
        workload = row["workload"]
        return Workload(
            definition=row["definition"],
            uuid=workload["uuid"],
            axes=workload["axes"],
            inputs=workload["inputs"],
            source=row["source"],
            live_query_rows=row.get("live_query_rows"),
        )


def degenerate(definition: str, axes: Mapping[str, int]) -> bool:
    """Whether a prefill has more queries than cached tokens: most of its rows see nothing.

    False for a definition that is none of the 46.
    """
    if "total_q" not in axes or "num_kv_indices" not in axes or definition not in names():
        return False
    return axes["total_q"] > axes["num_kv_indices"] * load(definition).const_axes["page_size"]


def workloads(name: str) -> list[Workload]:
    """The rows of one of the 46 definitions, public ones first; DefinitionError for any other."""
    definition = load(name)
    path = FOLDER / definition.op_type / f"{definition.name}.jsonl"
    if not path.is_file():
        raise DefinitionError(f"{definition.name}: no workloads come with ptxflow for it")
    with path.open(encoding="utf-8") as lines:
        return [Workload.from_json(json.loads(line)) for line in lines]
