# syntax=docker/dockerfile:1
# A worker: vLLM's own image and the plugin. From the root of the repository:
#   docker build -f deploy/containers/worker.Dockerfile -t saga-worker:0.1.0 .
# The base is pinned by its tag here; a build that is to be repeatable gives a digest as well:
#   --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0@sha256:...
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE}
WORKDIR /opt/saga-src
COPY . .
# vLLM and torch of the image stay as they are: the build fails where the installation would
# replace them.
RUN versions='from importlib.metadata import version as v; print(v("vllm"), v("torch"))' \
    && before="$(python3 -c "$versions")" \
    && uv pip install --system --no-cache ".[vllm]" \
    && test "$before" = "$(python3 -c "$versions")"
RUN groupadd --gid 10001 saga \
    && useradd --uid 10001 --gid 10001 --home-dir /home/saga --create-home \
        --shell /usr/sbin/nologin saga \
    && mkdir /models \
    && chown 10001:10001 /models
# Weights and compiled kernels outlive the container where /models is a volume.
ENV HF_HOME=/models/huggingface \
    VLLM_CACHE_ROOT=/models/vllm \
    TRITON_CACHE_DIR=/models/triton \
    PYTHONUNBUFFERED=1
WORKDIR /home/saga
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000
# Loading a large model takes its time.
HEALTHCHECK --interval=15s --timeout=10s --start-period=1800s --retries=4 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
# The model and the options of `saga worker` and `vllm serve` follow.
ENTRYPOINT ["saga", "worker"]
