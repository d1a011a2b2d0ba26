"""GET /v1/models and GET /v1/models/{id}."""

from fastapi import APIRouter

from server.api.answers.objects import Model, ModelList
from server.http.responses import documented_errors
from server.http.services import Services, ServicesDep

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=documented_errors(401, 503))
async def list_models(services: ServicesDep) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(services)])


@router.get("/v1/models/{model:path}", responses=documented_errors(401, 404, 503))
async def retrieve_model(model: str, services: ServicesDep) -> Model:
    """The served model, if this is its name."""
    services.check_model(model)
    return _card(services)


def _card(services: Services) -> Model:
    return Model(id=services.model.name, created=services.model.created, max_model_len=services.info().max_model_len)
