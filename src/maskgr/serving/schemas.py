"""What requests and answers look like: the source of /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictBool, StrictInt, StrictStr

from maskgr.data.config import Unknown
from maskgr.decoding.config import Order, Retrieval

HISTORY, TOP, LIST, BATCH = 1_000, 500, 10_000, 256  # most items, results, listed IDs, requests
BEAMS, STEPS, SESSION, EXAMPLES, PAGE = 200, 64, 20, 5, 100
REQUEST_ID = r"^[\x21-\x7e]{1,128}$"

ItemId = Annotated[StrictStr | StrictInt, Field(description="An item's ID, as in the catalogue.")]
Count = Annotated[int, Field(strict=True)]
RequestId = Annotated[StrictStr, Field(pattern=REQUEST_ID)]


class Body(BaseModel):
    """A request; a key that is not listed is an error, so that a typing mistake is noticed."""

    model_config = ConfigDict(extra="forbid")


class Ask(Body):
    """What every question about a user has."""

    history: list[ItemId] | None = Field(
        None, max_length=HISTORY, description="The user's items, oldest first."
    )
    user_id: StrictStr | StrictInt | None = Field(
        None, description="A user of the training data, in place of a history."
    )
    top: Count = Field(10, ge=1, le=TOP, description="How many results.")
    allow: list[ItemId] | None = Field(
        None, max_length=LIST, description="Only these items; null: all."
    )
    deny: list[ItemId] = Field([], max_length=LIST, description="None of these items.")
    where: StrictStr | None = Field(
        None,
        max_length=2_000,
        description="A condition on the items' columns: in_stock and price < 30.",
    )
    exclude_seen: StrictBool | None = Field(
        None,
        description="Leave out the items of the history; null: where users never repeat an item.",
    )
    unknown: Unknown = Field(
        "raise", description="IDs that are not in the catalogue are an error, or skipped."
    )
    order: Order | None = Field(None, description="The order in which digits are revealed.")
    steps: Count | None = Field(
        None, ge=1, le=STEPS, description="Network evaluations; 1 scores every item at once."
    )
    beams: Count | None = Field(
        None, ge=1, le=BEAMS, description="Partly revealed items kept after each step."
    )
    fields: list[StrictStr] | None = Field(
        None, max_length=100, description="Columns of the items to return; null: all."
    )
    model: StrictStr | None = Field(None, description="A name from /v1/model; null: the first.")
    request_id: RequestId | None = Field(
        None, description="Returned and logged; else X-Request-ID, else a new one."
    )


class RecommendRequest(Ask):
    retrieval: Retrieval | None = Field(None, description="How items are found.")


class ExplainRequest(RecommendRequest):
    top: Count = Field(5, ge=1, le=TOP, description="How many results.")
    examples: Count = Field(
        0, ge=0, le=EXAMPLES, description="Items to name for each beam that have its digits."
    )


class SessionsRequest(Ask):
    items: Count = Field(2, ge=1, le=SESSION, description="How many items a session has.")
    repeats: StrictBool | None = Field(
        None, description="Whether an item may be in a session twice; null: where users do so."
    )


class BatchRequest(Body):
    # Each is checked on its own, so that one mistake does not refuse the others.
    requests: list[SkipValidation[RecommendRequest]] = Field(min_length=1, max_length=BATCH)
    request_id: RequestId | None = None


class ReloadRequest(Body):
    model: StrictStr | None = Field(None, description="A name from /v1/model; null: the first.")
    path: StrictStr | None = Field(
        None,
        min_length=1,
        max_length=1_000,
        description="A run folder under the root; null: the folder that was loaded before.",
    )


class ModelName(BaseModel):
    name: str
    version: str = Field(description="Changes with the content of the model's folder.")


class Item(BaseModel):
    item_id: str | int
    fields: dict[str, Any] = Field(description="The item's columns.")
    sid: list[int] | None = Field(description="The semantic ID; null if the model has none.")


class ScoredItem(Item):
    score: float | None = Field(description="A log-probability, or a similarity.")


class Decoding(BaseModel):
    """How the digits were decoded."""

    order: Order
    steps: int
    beams: int


class Answer(BaseModel):
    request_id: str
    model: ModelName
    retrieval: Literal["ranking", "generative", "dense", "unified"] = Field(
        description="`ranking`: by a model that has no digits to generate."
    )
    decoding: Decoding | None
    unknown: list[str | int] = Field(description="IDs that were skipped.")
    took_ms: float
    timings_ms: dict[str, float] = Field(description="`queue`: waited; `model`: computed.")


class RecommendAnswer(Answer):
    items: list[ScoredItem]


class Session(BaseModel):
    items: list[Item]
    score: float | None = Field(description="The joint log-probability of the items.")


class SessionsAnswer(Answer):
    sessions: list[Session]


class Reveal(BaseModel):
    level: int = Field(description="From 0.")
    code: int
    probability: float


class Beam(BaseModel):
    digits: list[int | None] = Field(description="null is still masked.")
    revealed: list[Reveal] = Field(description="By this step.")
    parent: int = Field(description="The beam of the step before that it continues.")
    score: float
    remaining: int = Field(description="Items that have these digits.")
    examples: list[Item] = Field(description="Some of them, if asked for.")


class NearHistory(BaseModel):
    item_id: str | int
    similarity: float


class ExplainedItem(ScoredItem):
    nearest: list[NearHistory] = Field(description="The items of the history most similar to it.")


class ExplainAnswer(Answer):
    steps: list[list[Beam]] = Field(description="Best beam first; none in dense retrieval.")
    items: list[ExplainedItem]
    searched: int = Field(description="Results of the search; later ones are beyond its beams.")


class Problem(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str = Field(description="One sentence: what is wrong and what to do.")
    instance: str | None = Field(None, description="The request's ID.")
    errors: list[Pointed] = Field([], description="Where in the request, as JSON pointers.")


class Pointed(BaseModel):
    pointer: str = Field(description="#/history/3, or the name of a parameter.")
    detail: str


class BatchResult(BaseModel):
    """Either an answer or a problem."""

    status: int
    answer: RecommendAnswer | None = None
    problem: Problem | None = None


class BatchAnswer(BaseModel):
    request_id: str
    results: list[BatchResult] = Field(description="In the order of the requests.")
    took_ms: float


class SimilarAnswer(BaseModel):
    model: ModelName
    item_id: str | int
    by: Literal["vectors", "sids"]
    items: list[ScoredItem]


class ItemsAnswer(BaseModel):
    model: ModelName
    items: list[Item]
    next: str | None = Field(description="The cursor of the next page; null at the end.")
    total: int = Field(description="How many items match.")


class ItemAnswer(Item):
    model: ModelName


class Child(BaseModel):
    code: int
    count: int
    examples: list[Item]


class SidsAnswer(BaseModel):
    model: ModelName
    prefix: list[int | None] = Field(description="null is any digit.")
    level: int = Field(description="The level of the children, from 0.")
    count: int = Field(description="Items that have these digits.")
    children: list[Child] = Field(description="Codes of the next level; none below the last.")
    items: list[Item] = Field(description="Where all digits are given, the items that have them.")


class ExampleUser(BaseModel):
    user_id: str | int
    history: list[str | int]


class ModelAnswer(ModelName):
    kind: str = Field(description="As in `maskgr models`.")
    items: int
    fields: list[str] = Field(description="The columns of an item.")
    levels: int | None = Field(description="Digits of a semantic ID; null if there are none.")
    codes: list[int] | None = Field(description="The codes of each level.")
    decodes: bool = Field(description="Whether order, steps and beams have a meaning.")
    sessions: bool = Field(description="Whether /v1/sessions can be asked.")
    similar: list[Literal["vectors", "sids"]] = Field(description="What similarity is judged by.")
    retrieval: str = Field(description="The model's own way.")
    decoding: Decoding | None
    history_limit: int = Field(description="How many recent items the model looks at.")
    repeats: bool = Field(description="Whether users come back to an item.")
    knows_users: bool = Field(description="Whether user_id can be asked for.")
    example_users: list[ExampleUser]


class ModelsAnswer(ModelAnswer):
    """The asked for, or first, model, and the names of all."""

    models: list[ModelAnswer]


class ReloadAnswer(BaseModel):
    model: ModelName
    previous: ModelName
    took_ms: float


class Health(BaseModel):
    status: Literal["alive", "ready", "draining"]
