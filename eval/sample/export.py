"""A kernel library as a repository of the Hugging Face package `kernels`.

    ptxflow export out/library out/hub --license MIT

DIR/build/torch-cuda/ is the variant of Python with data files that every torch with CUDA takes:
`__init__.py` with `run`, the modules of `ptxflow.load`, the library, and metadata.json with the
device's architecture and a digest of every file. `kernels.get_local_kernel(DIR).run(A, B)` calls
it; pushed to the hub, `kernels.get_kernel` does.
"""

import argparse
import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ptxflow.command import Parser, reports
from ptxflow.compiler.library.manifest import LibraryError, Manifest, read_file, read_manifest
from ptxflow.eval.sample.folder import OutputFolder
from ptxflow.eval.sample.solution import ENTRY, texts

VARIANT = "torch-cuda"
METADATA = "metadata.json"
MINIMUM = "0.17.0"  # of `kernels`, whose metadata this is


def repository(manifest: Manifest, files: Mapping[str, bytes], license: str) -> dict[str, bytes]:
    """The files of a repository by path; `files` are the members' by name, `license` an SPDX name.

    The digest is of every file but the metadata itself, SHA-256 in base64.
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"ptxflow-{manifest.name}-{manifest.target.name}".lower())
    made = {path: text.encode() for path, text in texts(manifest, name).items()} | dict(files)
    made["__init__.py"] = made.pop(ENTRY)
    key = hashlib.sha256(b"".join(made[path] for path in sorted(made))).hexdigest()[:16]
    digest = {
        path: base64.b64encode(hashlib.sha256(data).digest()).decode()
        for path, data in sorted(made.items())
    }
    metadata = {
        "name": name,
        "id": f"{name.replace('-', '_')}_{key}",
        "version": 1,
        "license": license,
        "kernels-minver": MINIMUM,
        "python-depends": [],
        "backend": {
            "type": "cuda",
            "archs": [".".join(map(str, manifest.target.capability)) + "a"],
        },
        "digest": {"algorithm": "sha256", "files": digest},
    }
    made[METADATA] = (json.dumps(metadata, indent=2) + "\n").encode()
    return {f"build/{VARIANT}/{path}": data for path, data in made.items()}


@reports("export", LibraryError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="ptxflow export", description=__doc__)
    parser.add_argument("library", type=Path, help="a folder of sample.py --library")
    parser.add_argument("out", type=Path, metavar="DIR", help="the repository, whole or not at all")
    parser.add_argument("--license", required=True, metavar="SPDX", help="of the kernels, as MIT")
    args: argparse.Namespace = parser.parse_args(argv)
    manifest = read_manifest(args.library)
    files = {file.name: read_file(args.library, file) for file in manifest.files}
    with OutputFolder(args.out, marker=f"build/{VARIANT}/{METADATA}") as folder:
        for path, data in repository(manifest, files, args.license).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    print(f"{args.out}: build/{VARIANT}, {len(manifest.members)} kernels")
    return 0
