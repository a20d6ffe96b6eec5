"""Launches of the compiler as launch.json describes them, with their data in files beside it."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    evaluate,
)
from ptxflow.eval.verify.launch_file import LaunchFile, read
from tests.emulator.foreign.fixtures import Fixture, store

Array = npt.NDArray[Any]


def described(
    folder: Path,
    launch: Launch,
    tensors: Mapping[str, Array],
    axes: Mapping[str, int],
    dtypes: Mapping[str, str] | None = None,
    expected: Mapping[str, tuple[Array, float, float]] | None = None,
    arguments: Arguments | None = None,
    blank: Collection[str] = (),
) -> LaunchFile:
    """The first kernel's launch; `expected` has words and tolerances. float NaN is not written."""
    buffers: dict[str, dict[str, Any]] = {}
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name, array.dtype.name)
        np.save(folder / f"{name}.npy", array)
        buffers[name] = {
            "dtype": dtype, "shape": [max(n, 1) for n in array.shape] or [1],
            "contents": {"file": f"{name}.npy"},
        }  # fmt: skip
        if name in blank or (array.dtype.kind == "f" and np.isnan(array).all()):
            buffers[name]["contents"] = "none"
        if expected and name in expected:
            want, absolute, relative = expected[name]
            np.save(folder / f"{name}.want.npy", want)
            tolerance = {"atol": absolute, "rtol": relative}
            buffers[name]["expected"] = {"file": f"{name}.want.npy", **tolerance}

    def passed(param: Any) -> dict[str, Any]:
        match param:
            case TensorMapParam():
                return {
                    "tensor_map": param.tensor, "dtype": param.dtype,
                    "dims": [evaluate(d, axes) for d in param.dims],
                    "strides": [evaluate(s, axes) for s in param.strides],
                    "box": list(param.box), "swizzle": param.swizzle,
                }  # fmt: skip
            case PointerParam():
                return {"buffer": param.tensor if param.tensor in tensors else None}
            case ScalarParam():
                return {"value": evaluate(param.value, axes)}
            case PresentParam():
                return {"value": int(param.tensor in tensors)}
            case InputParam() | RandomParam():
                assert arguments is not None
                return {"value": arguments.word(param), "dtype": "uint32"}
        raise AssertionError(param)

    data = {
        "version": 1, "entry": launch.entry, "grid": [evaluate(g, axes) for g in launch.grid],
        "block": [launch.block], "cluster": list(launch.cluster),
        "shared_bytes": launch.smem_bytes, "buffers": buffers,
        "params": [passed(p) for p in launch.params],
    }  # fmt: skip
    (folder / "launch.json").write_text(json.dumps(data))
    return read(folder / "launch.json")


def fixture_described(folder: Path, fixture: Fixture) -> LaunchFile:
    """The launch of another compiler's kernel, with what it must compute."""
    wanted, blank = {}, []
    for name, values in fixture.expected.items():
        wanted[name] = (store(values, fixture.dtypes[name]), *fixture.tolerances[name])
        if np.isnan(fixture.values(name)).all():
            blank.append(name)
    return described(
        folder, fixture.launch, fixture.tensors, fixture.axes, fixture.dtypes, wanted, blank=blank
    )
