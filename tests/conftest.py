"""Work that tests have begun before their turn: what runs in processes of its own, beside tests that use one core.

::

    def started_by_hand(folder: Path) -> int: ...            # runs programs; computes nothing in this process

    @pytest.mark.ahead(work=started_by_hand)
    def test_it(ahead: int) -> None: ...                     # waits for the result, or raises what the work raised

One piece of work at a time, in the order of the tests that are run; one that several tests name is done once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

Work = Callable[[Path], Any]


class Ahead:
    """The work of a session, on one thread; each piece has a folder of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distkv-ahead-")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._results: dict[Work, Future[Any]] = {}

    def begin(self, work: Work) -> None:
        if work not in self._results:
            folder = Path(self._folder.name, str(len(self._results)))
            folder.mkdir()
            self._results[work] = self._thread.submit(work, folder)

    def result(self, work: Work) -> Any:
        return self._results[work].result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._folder.cleanup()


_AHEAD = pytest.StashKey[Ahead]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ahead(work=...): begin work(folder) early; see tests/conftest.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = [mark.kwargs["work"] for item in session.items for mark in item.iter_markers("ahead")]
    if wanted and not session.config.option.collectonly:
        session.config.stash[_AHEAD] = Ahead()
        for work in wanted:
            session.config.stash[_AHEAD].begin(work)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _AHEAD in session.config.stash:
        session.config.stash[_AHEAD].close()


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Any:
    """The result of the work that the test's marker names."""
    mark = request.node.get_closest_marker("ahead")
    return request.config.stash[_AHEAD].result(mark.kwargs["work"])
