"""GET /v1/models and GET /v1/models/{id}."""

from fastapi import APIRouter

from server.api.dialect import Dialect
from server.api.openai.objects import Model, ModelList
from server.api.openapi import documented_errors
from server.api.services import Services, ServicesDep

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=documented_errors(401, 503))
async def list_models(services: ServicesDep) -> ModelList:
    """The served model, under each of its names."""
    return ModelList(data=[_card(services, name) for name in services.model.names])


@router.get("/v1/models/{model:path}", responses=documented_errors(401, 404, 503))
async def retrieve_model(model: str, services: ServicesDep) -> Model:
    """The served model, if this is one of its names."""
    services.model.check_name(model)
    return _card(services, model)


def _card(services: Services, name: str) -> Model:
    return Model(id=name, created=services.model.created, max_model_len=services.info().max_model_len)


DIALECT = Dialect(router)
