"""One server for all tests of this folder, which are skipped where there is no SDK."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.agents.client import Agent


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "root"
    folder.mkdir()
    (folder.parent / "secret.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def agent(root: Path) -> "Iterator[Agent]":
    pytest.importorskip("mcp", reason="the extra ptxflow[mcp] is not installed")
    from tests.agents.client import agent as started

    with started(root) as found:
        yield found
