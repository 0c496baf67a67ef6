"""What requests and answers have in them, as the OpenAPI document describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, model_validator

Int64 = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Item = Int64 | StrictStr
Items = list[Item]
UserName = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """A field with another name is an error, not left out."""

    model_config = ConfigDict(extra="forbid")


class OfUsers(Body):
    """Users by their histories, or by name where their events were sent before."""

    histories: list[Items] | None = Field(None, min_length=1, description="Items of each user, oldest first.")
    users: list[UserName] | None = Field(None, min_length=1, description="In the place of histories.")
    timestamps: list[list[Int64]] | None = Field(
        None, description="Of the histories, for a model with times."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> OfUsers:
        if (self.histories is None) == (self.users is None):
            raise ValueError("give histories, or users")
        if self.timestamps is not None:
            if self.histories is None:
                raise ValueError("timestamps go with histories; those of users came with their events")
            if [*map(len, self.histories)] != [*map(len, self.timestamps)]:
                raise ValueError("timestamps must be as many as items, for each user")
        return self

    def __len__(self) -> int:
        return len(self.histories or self.users or ())


class Retrieve(OfUsers):
    """The k items of the highest scores of each user."""

    k: int = Field(10, strict=True, ge=1, lt=2**31)
    exclude: Literal["history"] | list[Items] | None = Field(
        "history", description="Left out: the history, nothing (null), or items of each user."
    )

    @property
    def values(self) -> int:
        """Of the answer."""
        return len(self) * self.k


class Score(OfUsers):
    """Scores of candidates for each user."""

    items: Items = Field(min_length=1)

    @property
    def values(self) -> int:
        """Of the answer."""
        return len(self) * len(self.items)


class Events(Body):
    """Events of a user, oldest first."""

    items: Items
    timestamps: list[Int64] | None = None


class Clicks(Body):
    """Impressions: dense features (B, F) and the ids or words (B,) of each feature, or B bags of them."""

    dense: list[list[Annotated[float, Field(strict=True, allow_inf_nan=False)]]] = Field(min_length=1)
    features: dict[str, Items | list[Items]]

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def values(self) -> int:
        """Of the answer."""
        return len(self)


class Shown(Body):
    """An item that is shown to a user. genres: of a model that has them."""

    item: Item
    timestamp: Int64
    genres: list[Int64] = Field(default_factory=list)


class Past(Shown):
    """An event of a user, with the id of what the user did."""

    action: Int64


class Sample(Body):
    """A user: features, events, oldest first, and the items that are shown now."""

    context: dict[str, Item] = Field(default_factory=dict)
    history: list[Past] = Field(default_factory=list)
    exposed: list[Shown] = Field(min_length=1)


class Impressions(Body):
    """Items shown to users, for an exported GRM."""

    samples: list[Sample] = Field(min_length=1)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def values(self) -> int:
        """Of the answer, for each task."""
        return sum(len(sample.exposed) for sample in self.samples)


class Answer(BaseModel):
    """step: of the model that answered. sequence: of the delta, where the server follows a trainer."""

    step: int
    sequence: int | None = None


class Retrieved(Answer):
    """Best first; scores are float32."""

    items: list[Items]
    scores: list[list[float]]


class Scored(Answer):
    """(users, items) float32."""

    scores: list[list[float]]


class Predicted(Answer):
    """Probabilities of a click, float32."""

    probabilities: list[float]


class Judged(Answer):
    """Of each sample, each item shown and each task a probability, float32."""

    tasks: list[str]
    probabilities: list[list[list[float]]]


class Kept(Answer):
    """A user's history now has so many events, which is no more than the model takes."""

    user: str
    events: int


class Problem(BaseModel):
    """name: of the error, one of a short list."""

    name: str
    message: str


class Failed(BaseModel):
    """Of every error."""

    error: Problem
