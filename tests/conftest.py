"""Environment and order of the test suite."""

from __future__ import annotations

import os

# The TPU compiler is asked to stay offline and quiet, and jax to run on the CPU.
# This has to happen before anything imports jax.
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "DECOUPLE_GCLOUD": "TRUE",
}.items():
    os.environ.setdefault(_name, _value)
