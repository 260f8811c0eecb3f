"""Every run that a test or a cell records is replayed when its recording ends, and must end where the engine did."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    from walkvllm.replay import check
    from walkvllm.trace import Recording

    ended = Recording.ended

    def ended_and_checked(self: Recording, *args: Any, **kwargs: Any) -> None:
        ended(self, *args, **kwargs)
        if not self.run.dropped and not self.run.problem:
            check(self.run)

    Recording.ended = ended_and_checked  # type: ignore[method-assign]
