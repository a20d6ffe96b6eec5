"""ptxflow: a generative GPU kernel autotuner with a checked raw PTX compiler.

The four subpackages `gfn`, `env`, `compiler` and `eval` are the top-level folders of the
repository. They are reached through symbolic links beside this file; where a checkout has no
symbolic links, the repository root is searched instead. They are never imported under their bare
names, because torchgfn installs as `gfn`.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_here = _Path(__file__).resolve().parent
if not (_here / "compiler").is_dir():
    __path__.append(str(_here.parent))
