from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    """Trainings of a second leave out the plot, for which matplotlib takes seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        yield
