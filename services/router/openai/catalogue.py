"""The models that a caller may use."""

from dataclasses import dataclass

import msgspec

from prfaas.errors import InvalidRequest, ModelNotFound, Overloaded
from services.router.admission_port import AdmissionPort, Caller
from services.router.openai.port import Backend, ModelCard


class Model(msgspec.Struct, frozen=True):
    """`max_model_len` is the name under which vLLM and its clients know the context length."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "prfaas"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[Model, ...]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class Catalogue:
    backend: Backend
    admission: AdmissionPort

    def list(self, caller: Caller) -> ModelList:
        return ModelList(tuple(_shown(card) for card in self.backend.models() if caller.may_use(card.id)))

    def model(self, model: str, caller: Caller) -> Model:
        return _shown(self.card(model, caller))

    def card(self, model: str | None, caller: Caller) -> ModelCard:
        """Of this model, or of the only one there is for the caller."""
        if model is not None:
            self.admission.check_model(caller, model)
        cards = self.backend.models()
        if not cards:  # a model that comes back must not look like one that never was
            raise Overloaded(self.backend.obstacle() or "no model is served")
        if model is None:
            own = [card for card in cards if caller.may_use(card.id)]
            if len(own) != 1:
                raise InvalidRequest("There are several models: name one", param="model")
            return own[0]
        for card in cards:
            if card.id == model:
                return card
        if self.backend.was_served(model):
            raise Overloaded(f"no live worker serves {model}")
        raise ModelNotFound(model)


def _shown(card: ModelCard) -> Model:
    return Model(card.id, card.created, card.max_context_tokens)
