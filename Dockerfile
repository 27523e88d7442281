# Images for machines with GPUs. Not run on a GPU.
#   docker build --target trainer --tag agent-rl-trainer .
#   docker build --target engine  --tag agent-rl-engine  .
# BASE: an image with CUDA 13's toolkit, with which the engine compiles kernels, on Debian or Ubuntu.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM ${BASE} AS source
# What the base image lacks of the programs that installation, JIT kernels and sandboxes need.
ARG PACKAGES="git g++ python3 python3-dev python3-venv bubblewrap"
RUN test -z "${PACKAGES}" || (apt-get update -qq \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ${PACKAGES} \
  && rm -rf /var/lib/apt/lists/*)
WORKDIR /opt/agent-rl
COPY . .
ENV PATH=/opt/agent-rl/.venv/bin:${PATH} PYTHONUNBUFFERED=1

FROM source AS trainer
# 2.14.1: the other pair of releases in docs/how-to/gpus.md.
ARG TORCH=2.13.0
ENV AGENT_RL_TORCH=${TORCH}
RUN python3 -m agent_rl.bootstrap trainer
ENTRYPOINT ["agent-rl"]

# Trainer and engines of one machine: engines are processes of the image that starts them.
FROM trainer AS engine
RUN python3 -m agent_rl.bootstrap engine-cuda
