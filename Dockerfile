# docker build -t r2sm_jax . && docker run --gpus all -v "$PWD/runs:/r2sm_jax/runs" r2sm_jax python -m r2sm_jax.train
# JAX's wheels bring CUDA's libraries along; the host needs a driver for CUDA 13 (580 or newer). Not built by our tests.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /r2sm_jax
COPY pyproject.toml README.md LICENSE ./
COPY r2sm_jax ./r2sm_jax
COPY configs ./configs
COPY scripts ./scripts
COPY tests ./tests
RUN pip install --no-cache-dir -e '.[cuda,test]'
CMD ["python", "scripts/gpu.py", "checks", "--out", "runs/gpu"]
