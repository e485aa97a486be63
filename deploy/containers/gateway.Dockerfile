# syntax=docker/dockerfile:1
# The gateway. From the root of the repository:
#   docker build -f deploy/containers/gateway.Dockerfile -t saga-gateway:0.1.0 .
# The base is pinned by its tag here; a build that is to be repeatable gives a digest as well:
#   --build-arg PYTHON_IMAGE=python:3.12.11-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY . .
# The lock names the versions that the tests run with.
RUN python -m venv /opt/saga \
    && /opt/saga/bin/python -m pip install --no-cache-dir -c requirements/dev.lock \
        ".[gateway,kubernetes,otel]"

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 saga \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/saga --create-home \
        --shell /usr/sbin/nologin saga
COPY --from=build /opt/saga /opt/saga
ENV PATH=/opt/saga/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/saga
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8800
# /version answers without a worker, /health does not: a gateway that waits for workers is well.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8800/version', timeout=4)"]
ENTRYPOINT ["saga", "gateway"]
CMD ["--host", "0.0.0.0", "--port", "8800"]
