"""SASRec (Kang and McAuley, 2018): a causal transformer over items predicts the next one.

Every position of a history predicts the item that follows. An item's vector, input and output
alike, is made of its ID, or of its ID and its text. The loss is the cross-entropy over the whole
catalogue, the same with sampled negatives (log-q corrected, for catalogues of millions), or, as
published, a binary cross-entropy with one random negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor, nn

from maskgr.data.sequences import Counts, Sequences
from maskgr.data.splits import Holdout
from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.models.graphs import Exported, PaddedHistory, history_graph
from maskgr.models.items import item_text
from maskgr.models.retrieval import rank_items, validation_recall
from maskgr.nn.item_vectors import OWN_STD, DigitVectors, ItemSource, ItemVectors, Table
from maskgr.nn.softmax import (
    Bonus,
    NegativeSampler,
    binary_cross_entropy,
    catalogue_cross_entropy,
    sampled_cross_entropy,
)
from maskgr.nn.transformer import Dropout, Encoder, Layout, TransformerConfig, causal_mask
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.settings import require_choice, require_numbers
from maskgr.sids.config import EncoderConfig
from maskgr.sids.item_text import ItemText
from maskgr.training.fit import Batch, FitConfig, Trainable

WRITTEN_OUT = 2**20  # items whose vectors are computed once and kept, where they are sums of digits
WEIGHTS = "network.safetensors"


Loss = Literal["softmax", "sampled", "bce"]


@dataclass(frozen=True)
class SASRecConfig:
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    loss: Loss = "softmax"
    """Cross-entropy over all items, over sampled ones, or binary with one negative (published)."""
    negatives: int = 1024
    """Items that a batch is contrasted with where the loss is `sampled`."""
    items: ItemSource = "id"
    """Item vectors are learned from IDs, from texts with IDs on top, or from both side by side."""
    repeat_bias: bool = False
    """Learn how much more, or less, likely the items of a history are to come again."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """How texts become vectors."""

    def __post_init__(self) -> None:
        require_choice("items", self.items, ItemSource)
        require_choice("loss", self.loss, Loss)
        require_numbers(self, negatives=(1, 10**8))
        if self.repeat_bias and self.loss != "softmax":
            raise RequestError(
                f"repeat_bias goes with loss=softmax, not with {self.loss}; leave one out"
            )


@dataclass(frozen=True, eq=False)
class NegativeBatch(Batch):
    """A batch with the items that it is contrasted with."""

    negatives: Tensor  # (draws,) shared by all, or (items,) one for each item of the batch
    shared: bool

    def part(self, rows: np.ndarray) -> Batch:
        sequences, negatives = self.sequences.select(rows), self.negatives
        if not self.shared:
            starts = np.repeat(self.sequences.offsets[:-1][rows], sequences.lengths)
            negatives = negatives[torch.from_numpy(starts + sequences.places)]
        return replace(self, sequences=sequences, negatives=negatives)


class SASRec(Trainable):
    """The network, and the model: it is trained by `fit` and ranks items."""

    about: ClassVar = "causal transformer over item IDs, or IDs and text"
    needs: ClassVar = "nothing; item text where items=text or both"
    Config: ClassVar[type[Any]] = SASRecConfig
    supports_ddp: ClassVar = True
    weighs_events = True
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self,
        config: SASRecConfig,
        counts: Counts,
        embeddings: Tensor | None = None,
        history_limit: int = 20,
        vectors: nn.Module | None = None,
    ) -> None:
        """`counts` (items,): training events of each item, from which negatives are drawn.
        `vectors`: the item vectors, where they are not made of IDs and `embeddings`."""
        super().__init__()
        self.config, self.history_limit, self.counts = config, history_limit, counts
        self.text: ItemText | None = None
        width = config.transformer.width
        sparse = config.loss == "sampled"  # the others read every item, or were published so
        self.items = vectors or ItemVectors(
            width, len(counts), embeddings, config.items, sparse=sparse
        )
        self.start = nn.Parameter(torch.randn(1, width))
        self.dropout = Dropout(config.transformer.dropout)
        self.encoder = Encoder(config.transformer)
        self.query = nn.Linear(width, width)
        nn.init.eye_(self.query.weight)  # a history first asks for what is like its last item
        nn.init.zeros_(self.query.bias)
        self.repeat = nn.Parameter(torch.zeros(())) if config.repeat_bias else None
        self._sampler = NegativeSampler(torch.from_numpy(counts), config.negatives)
        self._table: Tensor | None = None  # (items, width) while in evaluation mode

    @property
    def width(self) -> int:
        return self.config.transformer.width

    @property
    def device(self) -> torch.device:
        return self.start.device

    def train(self, mode: bool = True) -> Self:
        self._table = None
        return super().train(mode)

    def encode(self, histories: Sequences, vectors: Tensor | None = None) -> tuple[Tensor, Layout]:
        """(tokens, width) hidden states of a start token and the items of each history, shortest
        first: the state at a token predicts the item after it.

        `vectors` (items, width): of the histories' items, where they are not to be looked up."""
        layout = Layout.of((histories.lengths + 1).tolist(), self.device)
        items = vectors
        if items is None:
            items = self._vectors(torch.from_numpy(histories.values).to(self.device).long())
        is_item = layout.positions > 0
        place = torch.where(is_item, is_item.cumsum(0), 0)
        embedded = torch.cat([self.start, items]).index_select(0, place)
        masks = [causal_mask(length, self.device) for _, length in layout.groups]
        hidden, _ = self.encoder(self.dropout(embedded), layout, masks)
        return hidden, layout

    def queries(self, hidden: Tensor) -> Tensor:
        """(rows, width) whose products with item vectors are logits."""
        found: Tensor = self.query(hidden) * self.width**-0.5
        return found

    def table(self) -> Table:
        """(items, width) the vectors of the whole catalogue; kept until `train` or `eval`.

        Sums of digits' vectors are not written out for catalogues above a million items.
        """
        if self._table is not None and not torch.is_grad_enabled():
            return self._table
        if isinstance(self.items, DigitVectors) and len(self.counts) > WRITTEN_OUT:
            return self.items.table()
        vectors: Tensor = self.items()
        if not (self.training or torch.is_grad_enabled()):
            self._table = vectors
        return vectors

    def _vectors(self, numbers: Tensor) -> Tensor:
        """(items, width) of some items; looked up in the table while weights do not change."""
        if not (self.training or torch.is_grad_enabled()):
            return self.table()[numbers]
        vectors: Tensor = self.items(numbers)
        return vectors

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> Batch:
        weight, loss = sequences.total_weight, self.config.loss
        if loss == "softmax":
            return Batch(sequences, weight)
        if loss == "sampled":
            return NegativeBatch(sequences, weight, self._sampler.draw(generator), shared=True)
        drawn = torch.randint(len(self.counts) - 1, (len(sequences.values),), generator=generator)
        targets = torch.from_numpy(sequences.values)
        others = drawn + (drawn >= targets)  # never the target
        return NegativeBatch(sequences, weight, others, shared=False)

    def forward(self, batch: Batch) -> Tensor:
        """() the summed loss of every item of the batch, given those before it."""
        if not len(batch.sequences):  # more processes than sequences
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            others = (p.sum() for n, p in self.named_parameters() if not n.startswith("items."))
            return 0 * sum(others, self.items(first).sum())
        hidden, _ = self.encode(batch.sequences.without_last())
        targets = torch.from_numpy(batch.sequences.values).to(self.device).long()
        bonus = self.repeat_bonus(*earlier_items(batch.sequences))
        table = self.items() if self.config.loss == "softmax" else None
        weights = batch.target_weights(self.device)
        return self.loss(self.queries(hidden), table, targets, batch, bonus, weights)

    def loss(
        self,
        queries: Tensor,
        table: Tensor | None,
        targets: Tensor,
        batch: Batch,
        bonus: Bonus | None,
        weights: Tensor | None,
    ) -> Tensor:
        """() the summed loss of `queries` (rows, width) that ask for `targets` (rows,), each times
        its weight (rows,) where there are weights.

        `table` (items, width) is for the softmax over all items; samples need no more than theirs.
        """
        if not isinstance(batch, NegativeBatch):
            assert table is not None
            return catalogue_cross_entropy(queries, table, targets, bonus=bonus, weights=weights)
        negatives = batch.negatives.to(self.device)
        if self.config.loss == "bce":
            positives = self.items(targets)
            return binary_cross_entropy(queries, positives, self.items(negatives), weights)
        return sampled_cross_entropy(
            queries,
            self.items(targets),
            self.items(negatives),
            log_q_negatives=self._sampler.log_q(negatives),
            hits=targets[:, None] == negatives,
            weights=weights,
        )

    def repeat_bonus(
        self, rows: npt.NDArray[np.int64], items: npt.NDArray[np.int64]
    ) -> Bonus | None:
        """The bias on the scores of `items` that were taken before, in the same `rows` (pairs,).

        The parameter is scaled by sqrt(width): one number has far to go where nobody takes an
        item twice, and a step of Adam moves it as little as each entry of a vector.
        """
        if self.repeat is None:
            return None
        values = (self.repeat * self.width**0.5).expand(len(rows))
        owners, numbers = torch.from_numpy(rows), torch.from_numpy(items)
        return Bonus(owners.to(self.device), numbers.to(self.device), values)

    @property
    def repeat_value(self) -> float:
        """The learned repeat bias, 0 where there is none."""
        return 0.0 if self.repeat is None else float(self.repeat.detach()) * self.width**0.5

    def validate(self, holdout: Holdout) -> dict[str, float]:
        return validation_recall(self.rank, holdout, len(self.counts))

    @torch.no_grad()
    def rank(self, query: Query) -> Ranked:
        if self.training:
            self.eval()
        return rank_items(
            query,
            lambda histories: self.queries(self.last_states(histories)),
            self.table(),
            history_limit=self.history_limit,
            bonus=lambda histories: self.repeat_bonus(*distinct_pairs(histories)),
        )

    @torch.no_grad()
    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        if self.training:
            self.eval()
        chosen = torch.from_numpy(numbers).to(self.device)
        return self.table()[chosen].float().cpu().numpy()

    def last_states(self, histories: Sequences) -> Tensor:
        """(users, width) the hidden state after each whole history, shortest first."""
        hidden, layout = self.encode(histories.last(self.history_limit))
        ends = torch.tensor([length for n, length in layout.groups for _ in range(n)]).cumsum(0)
        return hidden.index_select(0, (ends - 1).to(self.device))

    @classmethod
    def learn(cls, training: Training) -> Self:
        own: SASRecConfig = training.config.model
        text = item_text(training, own.encoder) if own.items != "id" else None
        torch.manual_seed(training.config.seed)
        embeddings = None if text is None else torch.from_numpy(text.embeddings)
        model = cls(own, training.counts, embeddings, training.config.history_limit)
        model.text = text
        training.fit(model)
        return model.eval()

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> SASRec:
        """New items by their text; without text nothing is known of them."""
        if self.text is None:
            raise RequestError(
                "a sasrec of item IDs alone knows nothing of new items; train one with items=text"
            )
        return self.grown(items, embeddings)

    def grown(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> SASRec:
        """Where items have no text, new ones start as every item did: at random."""
        if self.text is None:
            return self.enlarged(len(items), None)
        text = self.text.with_items(items, embeddings, self.device.type)
        model = self.enlarged(len(items), torch.from_numpy(text.embeddings))
        model.text = text
        return model

    def enlarged(
        self, added: int, embeddings: Tensor | None, vectors: nn.Module | None = None
    ) -> SASRec:
        """The same network for `added` items more; `embeddings` (items, any) of all, new ones last.
        `vectors`: the larger catalogue's own, where they are not made of IDs and embeddings."""
        counts = np.concatenate([self.counts, np.zeros(added, dtype=self.counts.dtype)])
        state = self.state_dict()
        if vectors is None:
            own = state["items.own.weight"]
            new = own.new_zeros(added, own.shape[1])
            if embeddings is None:
                nn.init.normal_(new, std=OWN_STD)
            state["items.own.weight"] = torch.cat([own, new])
        model = SASRec(self.config, counts, embeddings, self.history_limit, vectors)
        model.to(self.device).load_state_dict(state)
        return model.eval()

    def recount(self, counts: Counts) -> None:
        """Takes the `counts` (items,) of other training events, from which negatives are drawn."""
        self.counts = counts
        self._sampler = NegativeSampler(torch.from_numpy(counts), self.config.negatives)

    def update(self, training: Training) -> SASRec:
        self.recount(training.counts)
        training.fit(self)
        return self.eval()

    @torch.no_grad()
    def exported(self) -> Exported:
        network = PaddedHistory(self.start, self.encoder, self.query).eval()
        return Exported(
            {"history": history_graph(network, self.width, ("queries", "hidden"))},
            {"table": self.items().float().cpu().numpy()},
            {"history_limit": self.history_limit, "steps": 1, "repeat": self.repeat_value},
        )

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        np.save(folder / COUNTS, self.counts)
        if self.text is not None:
            self.text.save(folder / "text")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        text = ItemText.load(folder / "text") if config.model.items != "id" else None
        embeddings = None if text is None else torch.from_numpy(text.embeddings)
        model = cls(config.model, load_counts(folder), embeddings, config.history_limit)
        load_weights(model, folder / WEIGHTS)
        model.text = text
        return model.to(pick_device(config.device)).eval()


def earlier_items(
    sequences: Sequences,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(pairs,) each place of the batch with every item before it in its sequence, once."""
    places = sequences.places
    later = np.repeat(np.arange(len(places)), places)
    within = np.arange(len(later)) - np.repeat(np.cumsum(places) - places, places)
    earlier = sequences.values[later - places[later] + within].astype(np.int64)
    if sequences.repeats().any():
        size = int(sequences.values.max()) + 1
        later, earlier = np.divmod(np.unique(later * size + earlier), size)
    return later, earlier


def distinct_pairs(
    sequences: Sequences,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(pairs,) each row with every item that it holds, once."""
    once = sequences.keep(~sequences.repeats())
    return once.owners, once.values.astype(np.int64)


SASRec.presets = {
    "tiny": TrainConfig(
        "sasrec",
        SASRecConfig(TransformerConfig(layers=1, width=32, heads=2, hidden=64)),
        FitConfig(steps=200, token_budget=2048, learning_rate=3e-3, validations=4),
    ),
    "cpu": TrainConfig(
        "sasrec",
        SASRecConfig(TransformerConfig(layers=2, width=64, heads=2, hidden=256, dropout=0.5)),
        FitConfig(minutes=25, token_budget=1600, learning_rate=1e-3),
    ),
    # The authors' code (github.com/kang205/SASRec): two blocks, one head, width 50, dropout 0.5, 50
    # items, binary cross-entropy with one negative; 201 epochs of batches of 128 sequences (about
    # seven items each on Beauty), Adam at 1e-3. On MovieLens: dropout=0.2, history_limit=200.
    # Ours differs in what it is built of: rotary (relative) positions instead of learned (absolute)
    # ones, GELU instead of ReLU, dropout on the branches alone, normalised item vectors, a start
    # token, a linear map from states to queries, negatives that are not the target, beta2 of 0.999
    # (published: 0.98), and a learning rate that falls by a cosine instead of a constant one.
    "published": TrainConfig(
        "sasrec",
        SASRecConfig(
            TransformerConfig(layers=2, width=50, heads=1, hidden=50, dropout=0.5), loss="bce"
        ),
        FitConfig(steps=35_000, token_budget=880, learning_rate=1e-3, weight_decay=0.0, ema=0.0),
        history_limit=50,
    ),
}
