"""ptxflow: a generative GPU kernel autotuner with a checked raw PTX compiler.

The four subpackages `gfn`, `env`, `compiler` and `eval` are the top-level folders of the
repository, `sample` and `train` its scripts. They are reached through symbolic links
beside this file; where a checkout has no symbolic links, the repository root is searched first.
The folders are never imported under their bare names, because torchgfn installs as `gfn`.
"""

from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

_here = _Path(__file__).resolve().parent
if not (_here / "compiler").is_dir():
    if not (_here.parent / "compiler").is_dir():
        raise ImportError(
            "this ptxflow was built from a checkout without symbolic links and has no modules: "
            "build it from a checkout with them, or from its sdist"
        )
    __path__.insert(0, str(_here.parent))  # before the text files that stand for links


def __getattr__(name: str) -> _Any:
    """`load` comes when it is asked for: it needs torch."""
    if name == "load":
        from ptxflow.compiler.library.call import load

        globals()["load"] = load
        return load
    raise AttributeError(f"module 'ptxflow' has no attribute {name!r}")
