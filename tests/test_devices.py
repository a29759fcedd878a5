from __future__ import annotations

import pytest
import torch

from maskgr.devices import pick_device
from maskgr.errors import RequestError


def test_by_name_and_by_itself() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in {"cpu", "cuda", "mps"}


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="there is no device 'abacus'; give auto, cpu"):
        pick_device("abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="torch finds no cuda device here; give device auto"):
        pick_device("cuda:1")
