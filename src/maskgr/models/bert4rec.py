"""BERT4Rec (Sun et al., 2019): a bidirectional transformer over items fills in masked ones.

In training a fixed share of a sequence's items is replaced by a mask, and each masked item is
predicted from all that is left, before and after it; in some samples the last item alone is masked.
To recommend, a mask is appended to the history. It is the masked network of MaskGR with one token
an item and one noise level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.models.maskgr.noise import last_items, mask_share
from maskgr.models.retrieval import rank_items, validation_recall
from maskgr.nn.item_vectors import ItemVectors
from maskgr.nn.softmax import NegativeSampler, catalogue_cross_entropy, sampled_cross_entropy
from maskgr.nn.transformer import Dropout, Encoder, Layout, TransformerConfig
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.settings import require_at_least, require_choice
from maskgr.training.fit import Batch, FitConfig, Trainable

WEIGHTS = "network.safetensors"
SPARSE_RATIO, DENSE_RATIO = 0.6, 0.2  # published for Amazon Beauty, and for MovieLens
DENSE_LENGTH = 50  # items of a training sequence, on average, from which data count as dense

Loss = Literal["softmax", "sampled"]
Head = Literal["linear", "bert"]


@dataclass(frozen=True)
class Bert4RecConfig:
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    mask_ratio: float = 0.0
    """Share of a sequence's items that are masked; 0 is 0.6, or 0.2 where training sequences have
    50 items or more on average: the published ratios of sparse and dense data."""
    last_item_share: float = 0.5
    """Share of the samples in which the last item alone is masked: what inference meets."""
    head: Head = "linear"
    """A hidden state becomes scores by a linear map, or, as published, by a linear map, GELU, a
    norm and a bias an item."""
    loss: Loss = "softmax"
    """Cross-entropy over all items, or over sampled ones, for catalogues above a million."""
    negatives: int = 1024
    """Items that a batch is contrasted with where the loss is `sampled`."""

    def __post_init__(self) -> None:
        require_choice("loss", self.loss, Loss)
        require_choice("head", self.head, Head)
        require_at_least("negatives", self.negatives, 1)
        if not 0 <= self.mask_ratio <= 1:
            raise RequestError(
                f"mask_ratio is {self.mask_ratio}; use a share above 0, 1 at most, or 0 for the "
                "published one"
            )
        if not 0 <= self.last_item_share <= 1:
            raise RequestError(
                f"last_item_share is {self.last_item_share}; it is a share, from 0 to 1"
            )


@dataclass(frozen=True, eq=False)
class MaskedBatch(Batch):
    """A batch with the items that are masked, and those that they are contrasted with."""

    masked: Tensor  # (items,) bool
    negatives: Tensor | None  # (draws,) shared by all; None: every item of the catalogue

    def part(self, rows: np.ndarray) -> MaskedBatch:
        sequences = self.sequences.select(rows)
        starts = np.repeat(self.sequences.offsets[:-1][rows], sequences.lengths)
        masked = self.masked[torch.from_numpy(starts + sequences.places)]
        return replace(self, sequences=sequences, masked=masked)


class Bert4Rec(Trainable):
    """The network, and the model: it is trained by `fit` and ranks items."""

    about: ClassVar = "bidirectional transformer over item IDs that fills in masked items"
    needs: ClassVar = "nothing"
    Config: ClassVar[type[Any]] = Bert4RecConfig
    supports_ddp: ClassVar = True
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self,
        config: Bert4RecConfig,
        counts: npt.NDArray[np.int64],
        history_limit: int = 20,
    ) -> None:
        """`counts` (items,): training events of each item, from which negatives are drawn."""
        super().__init__()
        self.config, self.history_limit, self.counts = config, history_limit, counts
        width = config.transformer.width
        self.items = ItemVectors(width, len(counts), source="id")
        self.mask = nn.Parameter(torch.randn(1, width))
        self.dropout = Dropout(config.transformer.dropout)
        self.encoder = Encoder(config.transformer)
        self.query = nn.Linear(width, width)
        nn.init.eye_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        self.query_norm = nn.LayerNorm(width) if config.head == "bert" else None
        self.bias = nn.Parameter(torch.zeros(len(counts))) if config.head == "bert" else None
        self._sampler = NegativeSampler(torch.from_numpy(counts), config.negatives)
        self._table: Tensor | None = None  # (items, any) while in evaluation mode

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def train(self, mode: bool = True) -> Self:
        self._table = None
        return super().train(mode)

    # The network

    def encode(self, sequences: Sequences, masked: Tensor) -> Tensor:
        """(masked items, width) hidden states of the `masked` (items,) items of `sequences`, which
        come shortest first. What a masked item is, is not looked at."""
        layout = Layout.of(sequences.lengths.tolist(), self.device)
        visible = torch.from_numpy(sequences.values)[~masked].to(self.device).long()
        masked = masked.to(self.device)
        place = torch.where(masked, 0, (~masked).cumsum(0))
        embedded = torch.cat([self.mask, self.items(visible)]).index_select(0, place)
        hidden: Tensor = self.encoder(
            self.dropout(embedded),
            layout,
            [None] * len(layout.groups),  # every item sees every item
            rows=masked.nonzero().squeeze(1),
        )[0]
        return hidden

    def queries(self, hidden: Tensor) -> Tensor:
        """(rows, width), or one more, whose products with `vectors` are logits."""
        queries: Tensor = self.query(hidden)
        scale = queries.shape[1] ** -0.5
        if self.query_norm is None:
            return queries.mul(scale)
        queries = self.query_norm(functional.gelu(queries))
        return torch.cat([queries * scale, torch.ones_like(queries[:, :1])], dim=1)

    def vectors(self, numbers: Tensor | None = None) -> Tensor:
        """(items, width) of the items `numbers` (items,), or of the whole catalogue; where items
        have a bias, it is the last of one entry more."""
        vectors: Tensor = self.items(numbers)
        if self.bias is None:
            return vectors
        bias = self.bias if numbers is None else self.bias[numbers]
        return torch.cat([vectors, bias[:, None]], dim=1)

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> MaskedBatch:
        assert self.config.mask_ratio > 0
        owners = torch.from_numpy(sequences.owners)
        masked = mask_share(self.config.mask_ratio, owners, generator)
        chosen = torch.rand(len(sequences), generator=generator) < self.config.last_item_share
        masked = torch.where(chosen[owners], last_items(owners, 1), masked)
        negatives = self._sampler.draw(generator) if self.config.loss == "sampled" else None
        return MaskedBatch(sequences, float(masked.sum()), masked, negatives)

    def forward(self, batch: MaskedBatch) -> Tensor:
        """() the summed loss of the masked items."""
        if not len(batch.sequences):  # more processes than sequences
            return 0 * sum((p.sum() for p in self.parameters()), self.mask.sum())
        queries = self.queries(self.encode(batch.sequences, batch.masked))
        targets = torch.from_numpy(batch.sequences.values)[batch.masked].to(self.device).long()
        if batch.negatives is None:
            return catalogue_cross_entropy(queries, self.vectors(), targets)
        negatives = batch.negatives.to(self.device)
        return sampled_cross_entropy(
            queries,
            self.vectors(targets),
            self.vectors(negatives),
            log_q_negatives=self._sampler.log_q(negatives),
            hits=targets[:, None] == negatives,
        )

    def validate(self, holdout: Holdout) -> dict[str, float]:
        return validation_recall(self.rank, holdout, len(self.counts))

    @classmethod
    def learn(cls, training: Training) -> Self:
        own: Bert4RecConfig = training.config.model
        ratio = own.mask_ratio or published_ratio(training.split.train)
        torch.manual_seed(training.config.seed)
        model = cls(replace(own, mask_ratio=ratio), training.counts, training.config.history_limit)
        training.fit(model)
        return model.eval()

    # Retrieval

    @torch.no_grad()
    def rank(self, query: Query) -> Ranked:
        if self.training:
            self.eval()
        if self._table is None:
            self._table = self.vectors()
        return rank_items(query, self.queries_after, self._table, history_limit=self.history_limit)

    def queries_after(self, histories: Sequences) -> Tensor:
        """(users, width of queries) for the item after each history, shortest first."""
        asked = with_one_more(histories.last(self.history_limit))
        return self.queries(self.encode(asked, last_items(torch.from_numpy(asked.owners), 1)))

    @torch.no_grad()
    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Without the biases, which say how popular an item is."""
        vectors: Tensor = self.items(torch.from_numpy(numbers).to(self.device))
        return vectors.float().cpu().numpy()

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        np.save(folder / COUNTS, self.counts)

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        model = cls(config.model, load_counts(folder), config.history_limit)
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


def published_ratio(train: Sequences) -> float:
    """The masking ratio that was published for data as sparse, or as dense, as these."""
    filled = int((train.lengths > 0).sum())
    return DENSE_RATIO if len(train.values) >= DENSE_LENGTH * filled else SPARSE_RATIO


def with_one_more(sequences: Sequences) -> Sequences:
    """The sequences with a place for one more item at the end; it holds item 0."""
    values = np.insert(sequences.values, sequences.offsets[1:], 0)
    return Sequences.from_lengths(values, sequences.lengths + 1)


Bert4Rec.presets = {
    "tiny": TrainConfig(
        "bert4rec",
        Bert4RecConfig(TransformerConfig(layers=1, width=32, heads=2, hidden=64)),
        FitConfig(steps=200, token_budget=2048, learning_rate=3e-3, validations=4),
    ),
    "cpu": TrainConfig(
        "bert4rec",
        Bert4RecConfig(TransformerConfig(layers=2, width=64, heads=2, hidden=256, dropout=0.3)),
        FitConfig(minutes=40, token_budget=4096, learning_rate=1e-3),
        history_limit=100,
    ),
    # The authors' code (github.com/FeiSun/BERT4Rec, run_beauty.sh, gen_data_fin.py and
    # bert_config_beauty_64.json), on Beauty: two layers, two heads, width 64, 256 hidden entries,
    # dropout 0.5; 50 items with the mask, 0.6 of them masked; ten masked copies of each sequence
    # and one with the last item alone masked; 400,000 steps of 256 sequences (about seven items
    # each), AdamW at 1e-4 after 100 steps of warm-up, weight decay 0.01, clipping at 5. On
    # MovieLens: mask_ratio=0.2, dropout=0.2, history_limit=199, token_budget=32000.
    # Ours differs in what it is built of: norms before the branches instead of after them, rotary
    # (relative) positions instead of learned (absolute) ones, no dropout of attention weights
    # (published: 0.2), normalised item vectors, no decay of item vectors, and a learning rate that
    # falls by a cosine instead of linearly.
    "published": TrainConfig(
        "bert4rec",
        Bert4RecConfig(
            TransformerConfig(layers=2, width=64, heads=2, hidden=256, dropout=0.5),
            mask_ratio=0.6,
            last_item_share=1 / 11,
            head="bert",
        ),
        FitConfig(
            steps=400_000,
            token_budget=1760,
            learning_rate=1e-4,
            warmup=100 / 400_000,
            weight_decay=0.01,
            clip=5.0,
            ema=0.0,
        ),
        history_limit=49,
    ),
}
