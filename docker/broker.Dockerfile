# A broker. It needs HORDE_DATABASE_URL. Untested: no container engine was at hand when it was written.
FROM python:3.11-slim-bookworm

# Options for pip on the machine that builds, such as another package index.
ARG PIP_ARGS=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/horde
COPY pyproject.toml README.md LICENSE ./
COPY horde horde
COPY worker worker
COPY migrations migrations
RUN pip install ${PIP_ARGS} ".[broker,redis]" && useradd --system --create-home --uid 10001 horde

USER horde
ENV HORDE_HOST=0.0.0.0 HORDE_PORT=7001 HORDE_LOG_FORMAT=json
EXPOSE 7001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import json, urllib.request as u; assert json.load(u.urlopen('http://127.0.0.1:7001/api/v2/status/heartbeat', timeout=2))['db_connection']"]
# exec: the broker is process 1 and gets the stop signal itself.
CMD ["sh", "-c", "horde db upgrade && exec horde serve"]
