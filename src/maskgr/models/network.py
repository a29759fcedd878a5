"""The network f of the paper's section 3.1: token table, mask, encoder, logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import DenseConfig, NetworkConfig, ObjectiveConfig, TrainConfig
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.causal import Copies, Past, Remembered
from maskgr.models.dense import DenseHead, ItemVectors, check_dense
from maskgr.models.maskgr.noise import Noise, draw_item_noise, draw_noise
from maskgr.models.maskgr.objective import States
from maskgr.nn.layout import Layout
from maskgr.nn.transformer import Dropout, Encoder, Memory, Tap, isolated_mask
from maskgr.sids.semantic_ids import SemanticIds

Part = Literal["dense", "digits"]  # of a causal network, that can be trained alone


class Network(nn.Module):
    """Noisy token sequences in, probabilities of the masked digits out.

    A token is (level, code), numbered level by level; `[MASK]` is the last number. The table
    that tokens enter through is the one that they are scored with. Where the history is pooled,
    its items have theirs, as parts of their vectors, with text and more beside them; the item that
    is predicted has another, whose tokens have to say all of it by themselves.
    """

    text: Tensor  # (items, any) embeddings of the catalogue
    text_mean: Tensor
    text_basis: Tensor
    entering: Tensor | None

    def __init__(
        self,
        config: NetworkConfig,
        sizes: Sequence[int],
        dense: DenseConfig | None = None,
        text: Tensor | None = None,
    ) -> None:
        """`sizes`: the codes of each level, an item has one token a level; `text`: (items, any)
        embeddings of the catalogue, where the dense settings use them."""
        super().__init__()
        self.config, self.dense_config = config, dense or DenseConfig()
        self.frozen_history = False  # what the dense head uses, while the digits learn
        self.sizes = tuple(sizes)
        self.starts = (0, *accumulate(self.sizes))  # of each level's tokens, and of [MASK]
        _check(config)
        check_dense(self.dense_config, config)
        width = config.width
        # Where the history is pooled, only the item that is predicted is ever masked.
        self.tokens = nn.Embedding(self.mask_token + (not self.pooled), width)
        self.bias = nn.Parameter(torch.zeros(self.mask_token))
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self._add_text(text)
        if self.pooled and self._text_width:
            # An item is first of all its text, which says what it is like, as random digits do not.
            with torch.no_grad():
                self.tokens.weight[: self.mask_token] *= 0.3
        if self.causal:
            self.start = nn.Parameter(torch.randn(1, width))
            self.levels = nn.Parameter(torch.randn(self.digits, width))
        if self.pooled:
            self.codes = nn.Embedding(self.mask_token + 1, width)
            nn.init.normal_(self.codes.weight, std=width**-0.5)
        learned = self.dense_config.table == "learned"
        if self.pooled or learned:
            own = len(self.text) if learned else 0
            self.items = ItemVectors(width, self._text_width, own)
        if self.dense_config.table != "off":
            inputs = width if self.causal else width * self.digits
            outputs = width if learned else self.text.shape[1]
            self.head = DenseHead(self.dense_config, inputs, outputs)

    def _add_text(self, text: Tensor | None) -> None:
        """Text embeddings are data, not learned: kept beside the network, not saved with it."""
        config = self.dense_config
        if text is None:
            if config.text_input or config.table != "off":
                raise RequestError("the dense settings need the items' text embeddings")
            text = torch.empty(0, 0)
        text = text.float()
        self.register_buffer("text", text, persistent=False)
        self.register_buffer("entering", None, persistent=False)
        self._text_width = min(text.shape[1], self.config.width) if config.text_input else 0
        if self._text_width:
            # What all texts have in common says nothing; of the rest as much as a state can hold
            # enters, its principal components, at unit variance.
            mean = text.mean(0)
            spread = torch.linalg.eigh((text - mean).T @ (text - mean) / len(text))
            basis = spread.eigenvectors.flip(1)[:, : self._text_width]
            scale = spread.eigenvalues.flip(0)[: self._text_width].clamp(min=0).mean().sqrt()
            self.register_buffer("text_mean", mean)
            self.register_buffer("text_basis", basis / scale.clamp(min=1e-9))
            if not self.pooled:
                self.text_maps = nn.Linear(self._text_width, self.digits * self.config.width)
                nn.init.normal_(self.text_maps.weight, std=self._text_width**-0.5)
                nn.init.zeros_(self.text_maps.bias)

    @property
    def digits(self) -> int:
        return len(self.sizes)

    @property
    def mask_token(self) -> int:
        return self.starts[-1]

    @property
    def causal(self) -> bool:
        return self.config.attention == "causal"

    @property
    def pooled(self) -> bool:
        return self.config.history == "pooled"

    @property
    def unit(self) -> int:
        """Tokens of an item that is history."""
        return 1 if self.pooled else self.digits

    @property
    def dense(self) -> bool:
        return self.dense_config.table != "off"

    @property
    def repeats(self) -> float:
        """The learned repeat bias of the dense head, where there is one."""
        return self.head.repeats if self.dense else 0.0

    def tokenise(self, digits: Tensor) -> Tensor:
        """(items, digits) codes -> (tokens,) token numbers, item after item."""
        starts = torch.tensor(self.starts[:-1], device=digits.device)
        return (digits + starts).flatten()

    def embed(self, tokens: Tensor) -> Tensor:
        """(tokens, width) the table's rows, scaled up: small enough there to be logits' weights,
        and here as large as what the blocks add."""
        rows: Tensor = self.tokens(tokens)
        return rows * math.sqrt(self.config.width)

    def embed_copies(self, tokens: Tensor, before: Tensor) -> Tensor:
        """(tokens, width) the tokens of items that a causal network predicts, each knowing its
        level and `before` (items, width), the state of the history before its item: what a masked
        digit first asks for is what the history asks for."""
        rows = functional.embedding(tokens, self._scored) * math.sqrt(self.config.width)
        copies = rows.view(-1, self.digits, self.config.width)
        return (copies + self.levels + before[:, None]).flatten(0, 1)

    @property
    def _scored(self) -> Tensor:
        """(tokens, width) what the states of masked digits are compared with."""
        weight: Tensor = (self.codes if self.pooled else self.tokens).weight
        return weight

    def item_vectors(self, digits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of items with `digits` (items, digits), and catalogue `numbers` (items,)
        by which text and a part of their own belong to them; None: of the whole catalogue."""
        if numbers is None and len(self.text):
            assert len(digits) == len(self.text), "numbers are needed for some of the items"
        text = self._text_of(numbers) if self._text_width else None
        vectors: Tensor = self.items(self.joined(digits), text, numbers)
        return vectors

    def joined(self, digits: Tensor) -> Tensor:
        """(items, width) the sum of the digits' embeddings, of unit variance."""
        tokens = self.tokenise(digits).view_as(digits)
        summed = functional.embedding_bag(tokens, self.tokens.weight, mode="sum")
        return summed * math.sqrt(self.config.width / self.digits)

    def table(self, digits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """(items, any) what the dense head's queries are multiplied with: of the items `numbers`
        (items,), whose digits are `digits` (items, digits), or of the whole catalogue."""
        if self.dense_config.table == "text":
            text = self.text if numbers is None else self.text.index_select(0, numbers)
            return self.head.targets(text)
        return self.head.targets(self.item_vectors(digits, numbers))

    def _text_of(self, numbers: Tensor | None) -> Tensor:
        """(items, text) what enters of the texts; None: of all."""
        if self.entering is None:
            with torch.autocast(self.text.device.type, enabled=False):
                self.entering = (self.text - self.text_mean) @ self.text_basis  # (all items, text)
        return self.entering if numbers is None else self.entering.index_select(0, numbers)

    def embed_history(self, digits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """(items × unit, width) items as the history has them: wholly visible, text included."""
        if self.pooled:
            return self.item_vectors(digits, numbers)
        embedded = self.embed(self.tokenise(digits))
        if self._text_width and numbers is not None:
            embedded = embedded + self.text_maps(self._text_of(numbers)).view_as(embedded)
        return embedded

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.entering = None  # another basis is loaded, perhaps
        return super().load_state_dict(*arguments, **options)

    def draw_noise(
        self, layout: Layout, config: ObjectiveConfig, generator: torch.Generator
    ) -> Noise:
        """What training masks: anything anywhere, or each item by itself where it is predicted
        from the clean items before it."""
        if not self.causal:
            return draw_noise(layout.sequences, self.digits, config, generator)
        if config.masking != "diffusion" or config.last_item_share:
            raise RequestError(
                "causal attention predicts every item from a clean history; leave out "
                "objective.masking=fixed and objective.last_item_share"
            )
        items = len(layout.sequences) // self.digits
        return draw_item_noise(items, self.digits, config, generator)

    def denoise(
        self,
        digits: Tensor,
        masked: Tensor,
        layout: Layout,
        rows: Tensor,
        numbers: Tensor | None = None,
    ) -> States:
        """The states of the tokens `rows` of sequences with `digits` (items, digits), laid out by
        their digits, of which the `masked` (tokens,) are hidden.

        `numbers` (items,) of the catalogue, where items have text or a part of their own.
        """
        if self.causal:
            past = self.remember(digits, layout, numbers)
            states = self.predict(past, digits, masked, layout, rows)
            if not self.dense:
                return States(states, None, None)
            every = torch.arange(len(digits), device=digits.device)
            return States(states, self.queries(past), every)
        noisy = self.tokenise(digits).masked_fill(masked, self.mask_token)
        embedded = self.embed(noisy)
        if self._text_width and numbers is not None:
            visible = (~masked.view_as(digits).any(1)).nonzero().squeeze(1)
            text = self.text_maps(self._text_of(numbers[visible]))
            shape = (len(digits), self.digits * self.config.width)
            spread = torch.zeros(shape, device=text.device, dtype=text.dtype)
            embedded = embedded + spread.index_add(0, visible, text).view_as(embedded)
        predicted = tap = None
        if self.dense:
            predicted = masked.view_as(digits).all(1).nonzero().squeeze(1)
            within = torch.arange(self.digits, device=digits.device)
            tap = Tap(self.tap_layer, (predicted[:, None] * self.digits + within).flatten())
        states, tapped = self.encode(embedded, layout, rows, tap=tap)
        if tapped is None:
            return States(states, None, None)
        return States(
            states, self.head(tapped.view(-1, self.digits * self.config.width)), predicted
        )

    def remember(self, digits: Tensor, layout: Layout, numbers: Tensor | None) -> Remembered:
        """What a causal network knows of the histories, before it is asked for items; the
        arguments are those of `denoise`."""
        past = Past.of(layout, self.digits, self.unit)
        own = None if numbers is None else numbers[past.items]
        units = torch.cat([self.start, self.embed_history(digits[past.items], own)])
        units = units.index_select(0, past.units)
        if not self.frozen_history:
            units = self.dropout(units)
        states = self.encoder.history(units, past.layout, past.masks)
        return Remembered(past, states, states.index_select(0, past.before))

    def queries(self, remembered: Remembered) -> Tensor:
        """(items, width of an item's vector) the dense head's for every item."""
        found: Tensor = self.head(remembered.before)
        return found

    def predict(
        self, remembered: Remembered, digits: Tensor, masked: Tensor, layout: Layout, rows: Tensor
    ) -> Tensor:
        """(rows, width) the states of the tokens `rows` of items with `digits` (items, digits),
        each after a history (`maskgr.models.causal`); they need not be the items that came."""
        plan = Copies.of(remembered.past, layout, self.digits, self.unit)
        noisy = self.tokenise(digits).masked_fill(masked, self.mask_token)
        copies = self.dropout(self.embed_copies(noisy, remembered.before))
        joint = torch.cat([remembered.states, copies]).index_select(0, plan.order)
        states: Tensor = self.encoder(joint, plan.layout, plan.masks, plan.copies[rows])[0]
        return states

    @property
    def tap_layer(self) -> int:
        """How many layers the states pass before the dense head reads them, where digits and
        history pass the same."""
        return self.dense_config.layer or self.config.layers

    def encode(
        self,
        embedded: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        target_items: int = 1,
        *,
        memories: Sequence[Memory] | None = None,
        past: Sequence[int] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, width) states, or (rows, width) those of the tokens `rows` alone; and those
        tapped on the way.

        In the `isolated` attention the history does not see the last `target_items` items. With
        `memories` (one a block) `past` says how many remembered tokens precede each group's.
        """
        masks: list[Tensor | None] = [None] * len(layout.groups)
        if self.config.attention == "isolated":
            before = past or [0] * len(layout.groups)
            target = target_items * self.digits
            masks = [
                isolated_mask(skip + length, target, embedded.device)[skip:]
                for (_, length), skip in zip(layout.groups, before, strict=True)
            ]
        found: tuple[Tensor, Tensor | None] = self.encoder(
            self.dropout(embedded), layout, masks, rows, memories, tap
        )
        return found

    def hidden(
        self,
        tokens: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        target_items: int = 1,
    ) -> Tensor:
        """`encode` of the tokens' own embeddings."""
        return self.encode(self.embed(tokens), layout, rows, target_items)[0]

    def log_probs(self, hidden: Tensor, level: int, allowed: Tensor | None = None) -> Tensor:
        """(rows, codes) log-probabilities of `level`'s codes, in float32.

        With logits = "vocabulary" (the paper) the tokens of all levels share the mass, so a
        level's codes have somewhat less than 1 of it. `allowed` (rows, codes) leaves the softmax
        to these codes alone, and everything else has -inf.
        """
        start, stop = self.starts[level], self.starts[level + 1]
        if allowed is None and self.config.logits == "vocabulary":
            return self._scores(hidden, 0, self.mask_token).log_softmax(-1)[:, start:stop]
        scores = self._scores(hidden, start, stop)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.log_softmax(-1)

    def _scores(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """(rows, stop - start) logits of these tokens; float32 even where products are not."""
        table = self._scored[start:stop]
        return functional.linear(hidden, table, self.bias[start:stop]).float()

    def learn_only(self, part: Part | None) -> None:
        """Which parameters of a causal network are trained: those that the dense head uses, those
        that only the digits use, or all.

        While the digits learn by themselves, what they start from is frozen: no dropout there.
        """
        own: list[Tensor] = [self.bias]
        own += [*self.encoder.norm.parameters(), *self.encoder.blocks.parameters()]
        if self.causal:
            own.append(self.levels)
        if self.pooled:
            own.append(self.codes.weight)
        for parameter in self.parameters():
            parameter.requires_grad_(part != "digits")
        for tensor in own:
            tensor.requires_grad_(part != "dense")
        self.frozen_history = part == "digits"
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen_history:
            self.encoder.history_blocks.eval()
        return self


def _check(config: NetworkConfig) -> None:
    if config.attention != "causal":
        for name, plain in (("history", "tokens"), ("history_layers", 0)):
            if getattr(config, name) != plain:
                raise RequestError(
                    f"network.{name}={getattr(config, name)} goes with network.attention=causal "
                    f"only, not with {config.attention}"
                )
    if config.layers < 1 or config.history_layers < 0:
        raise RequestError(
            f"a network of {config.history_layers} + {config.layers} layers is none; use 0 or more "
            "history_layers and 1 or more layers"
        )
    if not 0 <= config.dropout < 1:
        raise RequestError(f"network.dropout={config.dropout} must be 0 or more and below 1")


def flops_per_token(
    network: Network,
    length: float,
    masked_share: float | None = None,
    *,
    part: Part | None = None,
    taught: bool = False,
    copies: int = 1,
) -> float:
    """Floating-point operations that training, of all or of a `part`, spends on a digit in products
    of matrices.

    The backward pass takes twice what the forward pass takes. `length`: the digits of a sequence,
    averaged over digits. What is skipped, because only the masked digits need it, is not counted.
    `taught`: whether the dense head teaches the digits; `copies`: of each item, whose digits are
    what is counted, but for the dense head alone.
    """
    config, m, unit = network.config, network.digits, network.unit
    if masked_share is None:
        masked_share = (m + 1) / (2 * m) if network.causal else 0.5
    width = config.width
    after = 2 * width**2 + 4 * width * config.hidden  # projection, up, down

    def attention(tokens: float) -> float:  # qkv, scores and their use
        return 2 * 3 * width**2 + 4 * tokens * width

    past = unit / m if network.causal else 0.0  # tokens of the history beside each digit
    history = config.history_layers * past * (attention(length * past) + after)
    digits = config.layers * (1 + past) * attention(length * (1 + past))
    digits += ((config.layers - 1) * (1 + past) + masked_share) * after
    codes = sum(network.sizes) / (1 if config.logits == "vocabulary" else m)
    digits += 2 * width * codes * masked_share
    head = catalogue = 0.0
    if network.dense:
        predicted = 1 / m if network.causal else masked_share**m / m  # items a digit
        head = predicted * network.head.flops
        catalogue = predicted * 2 * len(network.text) * network.head.outputs
        if not network.causal and network.tap_layer == config.layers:
            head += predicted * m * after
    teaching = catalogue if taught else 0.0
    if part == "dense":
        return 3 * (history + head + catalogue)
    if part == "digits":
        return (history + head + teaching) / copies + 3 * digits
    return (3 * (history + head + catalogue) + teaching) / copies + 3 * digits


def build_network(config: TrainConfig, sids: SemanticIds) -> Network:
    """As it is before anything is learned."""
    text = None
    if config.dense.text_input or config.dense.table != "off":
        text = torch.from_numpy(sids.embeddings)
    return Network(config.network, sids.codebook_sizes, config.dense, text)


def save_network(network: nn.Module, file: Path) -> None:
    save_file({n: v.cpu().contiguous() for n, v in network.state_dict().items()}, file)


def load_network(network: nn.Module, file: Path) -> None:
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ArtefactError(f"{file} cannot be used ({reason}); train again") from error
