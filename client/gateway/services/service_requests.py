"""Requests of `/admin/v1`: services to deploy, keys to make."""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from molink.client.gateway.services.service import (
    MOST_CIRCUITS,
    SERVICE_NAME,
    Parameters,
    ServiceSpecification,
)

MOST_BYTES: Final = 2**50
OVERLAP_S: Final = 86_400.0
_STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Region = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Resources(BaseModel):
    """What a service takes: how many circuits, over which peers."""

    model_config = _STRICT

    gpu: Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    gpu_count: Annotated[int, Field(ge=0, le=10_000)] = 0
    memory_bytes: Annotated[int, Field(ge=0, le=MOST_BYTES)] = 0
    regions: Annotated[list[Region], Field(max_length=64)] = []
    partners: Literal["auto", "off"] = "auto"
    minimum_circuits: Annotated[int, Field(ge=1, le=MOST_CIRCUITS)] = 1
    maximum_circuits: Annotated[int, Field(ge=1, le=MOST_CIRCUITS)] = 4
    tokens_per_circuit: Annotated[int, Field(ge=2, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _minimum_is_no_more(self) -> "Resources":
        if self.minimum_circuits > self.maximum_circuits:
            raise ValueError("minimum_circuits must not be more than maximum_circuits")
        return self


class InferenceParameters(BaseModel):
    """Parameters of requests that do not say; each as in chat completions."""

    model_config = _STRICT

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: Annotated[list[Text], Field(max_length=16)] | None = None

    def given(self) -> Parameters:
        """Those that were given."""
        return self.model_dump(exclude_none=True)


class DeployRequest(BaseModel):
    """POST /admin/v1/services."""

    model_config = _STRICT

    name: Annotated[str, Field(max_length=63, pattern=f"^{SERVICE_NAME.pattern}$")]
    model: Text
    resources: Resources = Resources()
    parameters: InferenceParameters = InferenceParameters()

    @model_validator(mode="before")
    @classmethod
    def _name_is_one(cls, asked: object) -> object:
        """In words that people understand, before the pattern is held against it."""
        name = asked.get("name") if isinstance(asked, dict) else None
        if isinstance(name, str) and SERVICE_NAME.fullmatch(name) is None:
            raise ValueError("name must be of a-z, 0-9 and hyphens, 63 at most, such as poet")
        return asked

    def specification(self) -> ServiceSpecification:
        """What is to be deployed."""
        asked = self.resources.model_dump() | {"regions": tuple(self.resources.regions)}
        return ServiceSpecification(model=self.model, parameters=self.parameters.given(), **asked)


class KeyRequest(BaseModel):
    """POST /admin/v1/services/{name}/keys."""

    model_config = _STRICT

    overlap_s: Annotated[float, Field(ge=0, le=366 * 86_400)] = OVERLAP_S
