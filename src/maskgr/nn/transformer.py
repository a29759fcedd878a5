"""A pre-norm transformer encoder over sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.errors import RequestError
from maskgr.settings import require_numbers


@dataclass(frozen=True)
class TransformerConfig:
    """The size of a transformer."""

    layers: int = 4
    width: int = 128
    """Entries of a token's hidden state."""
    heads: int = 4
    """Attention heads, each with an equal part of the width."""
    hidden: int = 512
    """Entries between the two linear maps of a layer."""
    dropout: float = 0.1
    """Share of entries dropped from the embeddings and from each branch of a layer."""

    def __post_init__(self) -> None:
        require_numbers(
            self,
            layers=(1, 1000),
            width=(1, 65_536),
            heads=(1, 1024),
            hidden=(1, 1_000_000),
            dropout=(0, 0.99),
        )
        if self.attention_width % (2 * self.heads):
            raise RequestError(
                f"a width of {self.attention_width} cannot be shared evenly by {self.heads} heads; "
                f"use a multiple of {2 * self.heads}"
            )

    @property
    def attention_width(self) -> int:
        """Entries of all heads together."""
        return self.width


@dataclass(frozen=True, eq=False)
class Layout:
    """Sequences laid end to end in one flat tensor of tokens.

    Operations on single tokens (norms, projections, logits) run on all of them as one matrix;
    attention runs on one group of neighbouring sequences of equal length at a time.
    """

    groups: tuple[tuple[int, int], ...]  # (sequences, tokens of each) of runs of equal length
    positions: Tensor  # (tokens,) place in the sequence, from 0
    sequences: Tensor  # (tokens,) which sequence a token belongs to, from 0

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Layout:
        """Sequences of `lengths` tokens, in this order; sorted lengths make the fewest groups."""
        sizes = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        sequences = torch.repeat_interleave(sizes)
        starts = sizes.cumsum(0) - sizes
        positions = torch.arange(len(sequences), device=device) - starts[sequences]
        groups = tuple((len(list(run)), length) for length, run in groupby(lengths))
        return cls(groups, positions, sequences)

    @property
    def sizes(self) -> list[int]:
        """The tokens of each group."""
        return [count * length for count, length in self.groups]


@lru_cache(maxsize=1024)
def isolated_mask(length: int, target: int, device: torch.device) -> Tensor:
    """(length, length) True where a query (row) may see a key (column).

    Everything is visible, except that only the last `target` tokens see each other: the history
    does not see the item being predicted.
    """
    is_target = torch.arange(length, device=device) >= length - target
    return is_target[:, None] | ~is_target[None, :]


@lru_cache(maxsize=1024)
def causal_mask(length: int, device: torch.device) -> Tensor:
    """(length, length) True where a query (row) may see a key (column): itself and earlier ones."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def rotary(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(tokens, 1, 1, width) cosines and signed sines of the rotary position embedding.

    Entry `i` is paired with entry `i + width / 2`; all `width / 2` frequencies are in use.
    """
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions.float()[:, None] * rates  # (tokens, width / 2)
    cosines = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sines = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cosines[:, None, None], sines[:, None, None]


def rotate(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """(tokens, ..., heads, width) rotated: dot products then depend on relative positions."""
    cosines, sines = rotation
    return torch.addcmul(vectors * cosines, vectors.roll(vectors.shape[-1] // 2, -1), sines)


class Dropout(nn.Module):
    """Dropout that draws a byte, not a float, for each entry on a CPU.

    On a CPU torch draws one number an entry, about a tenth of a small network's step; here eight
    entries share a 64-bit draw. The rate is rounded to a multiple of 1/256, and what is kept is
    scaled by that rounded rate, so the expectation is exact.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.dropped = round(rate * 256)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        if x.device.type != "cpu":
            return functional.dropout(x, self.rate)
        draws = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * (kept * (256 / (256 - self.dropped))).to(x.dtype)


class Block(nn.Module):
    """Pre-norm self-attention and a feed-forward network, each a residual branch.

    Dropout falls on the two branches, not on the GELU's output: for the paper's 3072 hidden
    entries a token, drawing the random numbers would cost as much as another matrix product on a
    CPU. GELU is the exact one: there, torch's tanh approximation is slower.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.attention_width)
        self.out = nn.Linear(config.attention_width, config.width)
        self.hidden_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        rotation: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        rows: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """(tokens, width), or (rows, width) of the tokens `rows` alone.

        The last block needs only the rows that are scored, and most of its work comes after the
        attention.
        """
        attended = self.attend(self.attention_norm(x), layout, rotation, masks, memory)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return self.feed_forward(x + self.dropout(self.out(attended)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """(tokens, width) with the second branch added."""
        hidden = functional.gelu(self.up(self.hidden_norm(x)))  # (tokens, hidden)
        out: Tensor = x + self.dropout(self.down(hidden))
        return out

    def attend(
        self,
        x: Tensor,
        layout: Layout,
        rotation: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        memory: Memory | None = None,
    ) -> Tensor:
        """(tokens, attention width) each token attends to its own sequence."""
        qkv = self.qkv(x).unflatten(1, (3, self.heads, -1))  # (tokens, 3, heads, width of a head)
        queries_keys = rotate(qkv[:, :2], rotation)
        # One split, not a slice a group: the gradient of a slice is as large as the whole.
        parts = zip(
            layout.groups,
            torch.split(queries_keys, layout.sizes),
            torch.split(qkv[:, 2], layout.sizes),
            masks,
            strict=True,
        )
        gathered = []
        for group, ((count, length), both, values, mask) in enumerate(parts):
            q, k = both.view(count, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            v = values.view(count, length, self.heads, -1).transpose(1, 2)
            if memory is not None:
                k, v = memory(group, k, v)
            # (count, heads, length, width of a head). Plain batched products are a little faster
            # below 30 tokens and slower above 60: not worth a second path.
            attended = functional.scaled_dot_product_attention(q, k, v, mask)
            gathered.append(attended.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(gathered)


def init_near_identity(module: nn.Module, depth: int) -> None:
    """Scales residual outputs by 0.1 / sqrt(2 * depth): near-identity at initialisation.

    Every other matrix keeps the variance of its input; biases start at zero.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            branch = name.endswith(("out.weight", "down.weight"))
            scale = 0.1 * (2 * depth) ** -0.5 if branch else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)


class Memory(Protocol):
    """A hook on a block's keys and values: it may keep them, or put cached ones before them."""

    def __call__(self, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values to attend to, from those of a group: (count, heads, length, d)."""
        ...


class Tap(NamedTuple):
    """Asks for hidden states of an intermediate layer."""

    layer: int  # read after this many layers
    rows: Tensor  # (rows,) tokens


class Encoder(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width = config.attention_width // config.heads
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        init_near_identity(self, depth=config.layers)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        masks: Sequence[Tensor | None],
        rows: Tensor | None = None,
        memories: Sequence[Memory] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, width) hidden states, or (rows, width) of the tokens `rows` alone; and the
        tapped hidden states, before the last norm.

        `masks`: one a group of the layout, None to see everything; `memories`: one a block.
        """
        rotation = rotary(layout.positions, self.head_width)
        last, tapped = len(self.blocks) - 1, None
        for i, block in enumerate(self.blocks):
            memory = None if memories is None else memories[i]
            picked = rows if i == last else None
            if tap is None or tap.layer != i + 1:
                x = block(x, layout, rotation, masks, picked, memory)
            elif picked is None:
                x = block(x, layout, rotation, masks, None, memory)
                tapped = x.index_select(0, tap.rows)
            else:
                picked = torch.cat([picked, tap.rows])
                x = block(x, layout, rotation, masks, picked, memory)
                x, tapped = torch.split(x, [len(picked) - len(tap.rows), len(tap.rows)])
        out: Tensor = self.norm(x)
        return out, tapped
