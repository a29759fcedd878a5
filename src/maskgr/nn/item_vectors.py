"""One vector an item, learned from its text and its own ID: input and output of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

ItemSource = Literal["id", "text", "both"]

OWN_STD = 0.02  # of own vectors at the start, where they do not start at zero
OWN_SCALE = 4.0  # own vectors on top of texts learn this many times as fast as other weights
OWN_SHARE = 0.3  # of own vectors beside texts, at the start
ROWS = 65_536  # embeddings of texts that are copied at once


class ItemVectors(nn.Module):
    """A vector for every item of a catalogue, made of its own vector, its text, or both.

    - `id`: LayerNorm(own vector), which starts at random.
    - `text`: LayerNorm(text map + own vector). The own vector starts at zero: an item is first what
      its text says, and learns slowly how it differs. Best where texts say much.
    - `both`: LayerNorm(a LayerNorm(text map) + b LayerNorm(own vector)) with learned a and b. Own
      vectors learn as fast as without text. Best where texts say little.

    New items have an own vector of zero.
    """

    embeddings: Tensor | None  # (items, any) of the texts
    text: Tensor | None  # (items, text width) centred principal components of the embeddings
    text_mean: Tensor
    text_basis: Tensor

    def __init__(
        self,
        width: int,
        n_items: int,
        embeddings: Tensor | None = None,
        source: ItemSource = "text",
        *,
        sparse: bool = False,
    ) -> None:
        """`embeddings` (n_items, any): of the items' texts; data, neither learned nor saved.
        `sparse`: own vectors get gradients where they are looked up, for catalogues of millions."""
        super().__init__()
        assert (embeddings is None) == (source == "id")
        self.width, self.source = width, source
        self.own = nn.Embedding(n_items, width, sparse=sparse)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("text", None, persistent=False)
        nn.init.normal_(self.own.weight, std=0.0 if source == "text" else OWN_STD)
        if embeddings is None:
            return
        assert len(embeddings) == n_items
        if source == "both":  # logarithms of the factors of text and own vector
            start = torch.tensor([0.0, math.log(OWN_SHARE)])
            self.factors = nn.Parameter(start / width**0.5)
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
        if self.text is None:  # else it is written over: loading takes no second one
            self.text = self.text_basis.new_empty(len(self.embeddings), self.text_basis.shape[1])
        for start in range(0, len(self.text), ROWS):
            part = self.embeddings[start : start + ROWS].to(self.text_mean)
            self.text[start : start + ROWS] = (part - self.text_mean) @ self.text_basis

    def forward(self, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of the items `numbers` (items,), or of the whole catalogue."""
        if numbers is not None:
            text = None if self.text is None else self.text.index_select(0, numbers)
            return self._vectors(self.own(numbers), text)
        if torch.is_grad_enabled():
            return self._vectors(self.own.weight, self.text)
        found = torch.empty_like(self.own.weight)
        for start in range(0, len(found), ROWS):  # what the result is made of is as large
            rows = slice(start, start + ROWS)
            text = None if self.text is None else self.text[rows]
            found[rows] = self._vectors(self.own.weight[rows], text)
        return found

    def _vectors(self, own: Tensor, known: Tensor | None) -> Tensor:
        """(items, width) of own vectors (items, width) and the texts that are `known`."""
        if known is not None:
            text = self.text_map(known)
            if self.source == "text":
                own = text + OWN_SCALE * own
            else:
                # Scaled by sqrt(width): one number has far to go, and a step of Adam moves it as
                # little as each entry of a vector.
                a, b = (self.factors * self.width**0.5).exp()
                shape = (self.width,)
                own = a * functional.layer_norm(text, shape) + b * functional.layer_norm(own, shape)
        out: Tensor = self.norm(own)
        return out


class DigitVectors(nn.Module):
    """The sum of one vector a digit: levels x codes vectors, whatever the size of the catalogue."""

    codes: Tensor  # (items, levels) rows of `digits`

    def __init__(self, width: int, codes: Tensor, sizes: Sequence[int]) -> None:
        """`codes` (items, levels), below `sizes` (levels,); data, neither learned nor saved."""
        super().__init__()
        self.digits = nn.EmbeddingBag(sum(sizes), width, mode="sum")
        small = torch.int16 if sum(sizes) <= torch.iinfo(torch.int16).max else torch.int32
        starts = torch.tensor((0, *accumulate(sizes))[:-1], device=codes.device, dtype=small)
        self.register_buffer("codes", codes.to(small) + starts, persistent=False)

    def forward(self, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of the items `numbers` (items,), or of the whole catalogue."""
        codes = self.codes if numbers is None else self.codes.index_select(0, numbers)
        out: Tensor = self.digits(codes.int())
        return out

    def table(self) -> DigitTable:
        return DigitTable(self.codes, self.digits.weight.detach())


class DigitTable:
    """The item vectors of a catalogue as sums of digits' vectors that are never written out.

    A score is the sum of one number a digit, looked up. It stands for a table (items, width) where
    one would not fit into memory.
    """

    def __init__(self, codes: Tensor, digits: Tensor) -> None:
        """`codes` (items, levels): rows of `digits` (codes of all levels, width)."""
        self.codes, self.digits = codes, digits
        self.shape, self.device = (len(codes), digits.shape[1]), digits.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, items: Tensor) -> Tensor:
        """(items, width)."""
        return functional.embedding_bag(self.codes[items].int(), self.digits, mode="sum")

    def scores(self, queries: Tensor, first: int, last: int) -> Tensor:
        """(rows, items) the products of `queries` (rows, width) and the items first to last - 1."""
        numbers = queries @ self.digits.T  # (rows, codes of all levels)
        columns = self.codes[first:last].T.int().contiguous()  # (levels, items)
        found = numbers.index_select(1, columns[0])
        for column in columns[1:]:
            found += numbers.index_select(1, column)
        return found


Table = Tensor | DigitTable


def table_scores(queries: Tensor, table: Table, first: int = 0, last: int | None = None) -> Tensor:
    """(rows, items) float32 products of `queries` (rows, width) and the items first to last - 1."""
    last = len(table) if last is None else min(last, len(table))
    if isinstance(table, DigitTable):
        return table.scores(queries.float(), first, last)
    return queries.float() @ table[first:last].float().T


def principal_components(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(d,) the mean of `rows` (n, d), and (d, k) a basis of their first k <= `most` principal
    components, scaled to unit variance on average.

    What all texts have in common says nothing about an item; a hidden state has room for `most`.
    """
    mean = rows.mean(0)
    products = rows.new_zeros(rows.shape[1], rows.shape[1])
    for part in torch.split(rows, ROWS):
        products += (centred := part - mean).T @ centred
    spread = torch.linalg.eigh(products / len(rows))
    count = min(rows.shape[1], most)
    basis = spread.eigenvectors.flip(1)[:, :count]
    scale = spread.eigenvalues.flip(0)[:count].clamp(min=0).mean().sqrt()
    return mean, basis / scale.clamp(min=1e-9)
