from __future__ import annotations

import pytest
import torch

from maskgr.devices import pick_device
from maskgr.errors import RequestError


def test_device_is_picked_by_name_or_automatically() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in {"cpu", "cuda", "mps"}


def test_raises_when_device_is_unknown_or_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="there is no device 'abacus'; give auto, cpu"):
        pick_device("abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="torch finds no cuda device here; give device auto"):
        pick_device("cuda:1")
