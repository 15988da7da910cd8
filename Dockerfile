# One image for every role: the command is the role.
#   docker build -t kvmesh .
# BASE_IMAGE: any Debian 12 or newer (or Ubuntu 24.04) with Python 3.11 or newer, or none yet. EXTRAS: "[cuda]" for NVIDIA GPUs.
# The secret `pip.conf` is for whoever needs an index or a certificate of their own; no layer keeps it.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        python3 python3-venv python3-dev g++ libfabric-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY native native
COPY shared shared
COPY services services
ARG EXTRAS=
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.pem,target=/run/secrets/ca.pem \
    python3 -m venv /opt/kvmesh \
    && /opt/kvmesh/bin/pip install -q --no-cache-dir --no-compile ".${EXTRAS}"

FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends ca-certificates libfabric1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/kvmesh --create-home kvmesh \
    && install -d -o kvmesh -g kvmesh /var/cache/kvmesh
COPY --from=build /opt/kvmesh /opt/kvmesh
# libfabric loads a library that otherwise takes over the signals.
ENV PATH=/opt/kvmesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    IPATH_NO_BACKTRACE=1 \
    KVMESH_CACHE=/var/cache/kvmesh \
    HF_HOME=/var/cache/kvmesh/huggingface \
    KVMESH_NAME=auto \
    KVMESH_HOST=auto \
    KVMESH_FABRIC_HOST=auto \
    KVMESH_PORT=8000
USER 10001
WORKDIR /var/lib/kvmesh
VOLUME /var/cache/kvmesh
EXPOSE 8000
HEALTHCHECK --interval=2s --timeout=3s --start-period=300s --retries=3 CMD ["kvmesh", "probe"]
ENTRYPOINT ["kvmesh"]
CMD ["--help"]
