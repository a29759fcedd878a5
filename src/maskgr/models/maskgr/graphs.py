"""MaskGR's two networks as graphs: a history is encoded once, and every step of decoding asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.decoding.config import DecodingConfig
from maskgr.models.graphs import Exported, Graph, PaddedHistory, history_graph
from maskgr.models.maskgr.denoiser import Denoiser
from maskgr.models.maskgr.queries import GenerativeModel
from maskgr.models.neighbours import FLOOR, RECENT
from maskgr.nn.item_vectors import DigitVectors
from maskgr.sids.semantic_ids import SemanticIds

DECODING = ("steps", "order", "beams", "guidance", "remask")  # settings that go with an export


class PaddedMemory(nn.Module):
    """Padded histories as the denoiser attends to them."""

    def __init__(self, history: PaddedHistory, denoiser: Denoiser) -> None:
        super().__init__()
        self.history, self.denoiser = history, denoiser

    def forward(self, vectors: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(users, width) queries with nothing revealed, (users, width) the last hidden states, and
        (users, tokens, heads, d) keys and values; arguments as in `PaddedHistory`."""
        queries, hidden = self.history(vectors, lengths)
        users, tokens, _ = hidden.shape
        places = torch.arange(tokens, device=hidden.device).repeat(users)
        both = self.denoiser.keys_values(hidden.flatten(0, 1), places)
        keys, values = (part.view(users, tokens, *part.shape[1:]) for part in both)
        last = hidden[torch.arange(users, device=lengths.device), lengths]
        return queries, last, keys, values


class PaddedDenoiser(nn.Module):
    """One step: the queries of partly revealed next items, as many for every user."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(
        self,
        queries: Tensor,
        last: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        codes: Tensor,
        revealed: Tensor,
    ) -> Tensor:
        """(users, beams, width); the history's own query where nothing is revealed.

        The first four as `PaddedMemory` gives them; `lengths` (users,): items of the histories;
        `codes`, `revealed` (users, beams, levels), where codes not revealed are arbitrary.
        """
        users, beams, levels = codes.shape
        ends = (lengths + 1)[:, None].expand(users, beams).flatten()  # tokens of the history
        x, asked = self.denoiser.ask(
            last[:, None].expand(users, beams, -1).flatten(0, 1),
            codes.reshape(users * beams, 1, levels),
            revealed.reshape(users * beams, 1, levels),
            torch.zeros_like(ends),
            ends,
        )
        asked = asked.view(users, beams, *asked.shape[1:])
        seen = torch.arange(keys.shape[1], device=keys.device) <= lengths[:, None]
        found = functional.scaled_dot_product_attention(
            asked.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), seen[:, None, None]
        )
        attended = found.transpose(1, 2).reshape(users * beams, -1)
        change = self.denoiser.answer(x, attended).view(users, beams, -1)
        return queries[:, None] + change * revealed.any(2, keepdim=True)


def denoiser_graph(denoiser: Denoiser, width: int) -> Graph:
    device = denoiser.codes.weight.device
    users, tokens, beams, levels = 3, 6, 4, len(denoiser.sizes)
    shapes = {
        "queries": (users, width),
        "last": (users, width),
        "keys": (users, tokens, denoiser.heads, width // denoiser.heads),
        "values": (users, tokens, denoiser.heads, width // denoiser.heads),
    }
    codes = torch.zeros(users, beams, levels, dtype=torch.int64, device=device)
    inputs = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    inputs |= {
        "lengths": torch.tensor([2, 5, 3], device=device),
        "codes": codes,
        "revealed": codes == 0,
    }
    axes = {name: {0: "users"} for name in inputs}
    for name in ("keys", "values"):
        axes[name] = {0: "users", 1: "tokens"}
    for name in ("codes", "revealed"):
        axes[name] = {0: "users", 1: "beams"}
    return Graph(PaddedDenoiser(denoiser), inputs, axes, ("asked",))


@torch.no_grad()
def exported(model: GenerativeModel, sids: SemanticIds, decoding: DecodingConfig) -> Exported:
    """The graphs, vectors and biases of a model that decodes so; one next item at a time.

    Where items are sums of their digits' vectors, these stand for the table.
    """
    history, denoiser, bias = model.history, model.denoiser, model.bias
    memory = PaddedMemory(PaddedHistory(history.start, history.encoder, history.query), denoiser)
    outputs = ("queries", "last", "keys", "values")
    graphs = {
        "history": history_graph(memory.eval(), history.width, outputs),
        "denoiser": denoiser_graph(denoiser, history.width),
    }
    arrays: dict[str, npt.NDArray[Any]] = {"codes": sids.digits.astype(np.int32)}
    if isinstance(history.items, DigitVectors):
        arrays["digit_vectors"] = history.items.digits.weight.cpu().numpy()
    else:
        arrays["table"] = history.items().float().cpu().numpy()
    settings: dict[str, Any] = {
        "history_limit": history.history_limit,
        "codebook_sizes": list(sids.codebook_sizes),
        "repeat": bias.repeat * history.repeat_value,
        **{name: getattr(decoding, name) for name in DECODING},
    }
    if model.neighbours is not None and bias.follow:
        near = model.neighbours.items
        assert near.weights is not None
        arrays |= {"neighbours": near.values, "strengths": near.weights}
        arrays["neighbour_offsets"] = near.offsets.astype(np.int32)
        settings |= {"follow": bias.follow, "recent": RECENT, "floor": FLOOR}
    return Exported(graphs, arrays, settings)
