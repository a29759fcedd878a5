"""One vector an item, learned from its text and its own ID: input and output of a network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

OWN_STD = 0.02  # of own vectors at the start, where there is no text
OWN_SCALE = 4.0  # own vectors learn this many times as fast as the other weights


class ItemVectors(nn.Module):
    """LayerNorm(text map + own vector) for every item of a catalogue.

    Where there is text, the own vector starts at zero: an item is first what its text says. New
    items keep it there. Without text it starts at random.
    """

    embeddings: Tensor | None  # (items, any) of the texts
    text: Tensor | None  # (items, text width) centred principal components of the embeddings
    text_mean: Tensor
    text_basis: Tensor

    def __init__(self, width: int, n_items: int, embeddings: Tensor | None = None) -> None:
        """`embeddings` (n_items, any): of the items' texts; data, neither learned nor saved."""
        super().__init__()
        self.own = nn.Embedding(n_items, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("text", None, persistent=False)
        if embeddings is None:
            nn.init.normal_(self.own.weight, std=OWN_STD)
            return
        assert len(embeddings) == n_items
        nn.init.zeros_(self.own.weight)
        mean, basis = principal_components(embeddings.float(), width)
        self.register_buffer("text_mean", mean)
        self.register_buffer("text_basis", basis)
        self.text_map = nn.Linear(basis.shape[1], width, bias=False)
        nn.init.normal_(self.text_map.weight, std=basis.shape[1] ** -0.5)
        self._project()
        # A loaded basis may differ from the one just made: fewer items, or another machine.
        self.register_load_state_dict_post_hook(lambda module, _: module._project())  # type: ignore[no-untyped-call]

    def _project(self) -> None:
        assert self.embeddings is not None
        self.text = (self.embeddings.to(self.text_mean) - self.text_mean) @ self.text_basis

    def forward(self, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of the items `numbers` (items,), or of the whole catalogue."""
        own: Tensor = OWN_SCALE * (self.own.weight if numbers is None else self.own(numbers))
        if self.text is not None:
            text = self.text if numbers is None else self.text.index_select(0, numbers)
            own = own + self.text_map(text)
        out: Tensor = self.norm(own)
        return out


def principal_components(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(d,) the mean of `rows` (n, d), and (d, k) a basis of their first k <= `most` principal
    components, scaled to unit variance on average.

    What all texts have in common says nothing about an item; a hidden state has room for `most`.
    """
    mean = rows.mean(0)
    centred = rows - mean
    spread = torch.linalg.eigh(centred.T @ centred / len(rows))
    count = min(rows.shape[1], most)
    basis = spread.eigenvectors.flip(1)[:, :count]
    scale = spread.eigenvalues.flip(0)[:count].clamp(min=0).mean().sqrt()
    return mean, basis / scale.clamp(min=1e-9)
