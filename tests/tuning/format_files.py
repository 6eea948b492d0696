"""Foreign tile files made for the tests, by the rules of their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tilepolicy.axes import GmmShape
from tilepolicy.formats.tokamax_arguments import PASS_DIMENSIONS
from tilepolicy.settings import Pass

V1_OP = "pallas_mosaic_tpu_ragged_dot"
V1_CLASS = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu.PallasMosaicTpuRaggedDot"


def arguments(shape: GmmShape, pass_: Pass = "fwd", **other: object) -> dict[str, object]:
    """Arguments of a bfloat16 grouped matmul as Tokamax writes them."""
    lhs, rhs = shape.operands(pass_)
    return {
        "lhs": f"bf16[{','.join(map(str, lhs))}]",
        "rhs": f"bf16[{','.join(map(str, rhs))}]",
        "group_sizes": {"num_groups": shape.g, "total_size": shape.m},
        "ragged_dot_dimension_numbers": PASS_DIMENSIONS[pass_],
        **other,
    }


def record(*times_ms: float) -> dict[str, object]:
    """A benchmark record with the five fields that every shipped one has."""
    return {
        "compile_time_ms": 1200.5,
        "lower_time_ms": 300.25,
        "evaluation_times_ms": list(times_ms),
        "metadata": {},
        "peak_memory_mb": 402.5,
    }


def v1_config(m: int, k: int, n: int, buffers: int = 2) -> str:
    """JSON text of a v1 configuration."""
    fields = {"tile_m": m, "tile_k": k, "tile_n": n, "input_buffer_count": buffers}
    return json.dumps({**fields, "combine_scopes": False})


def write_cache(
    folder: Path,
    entries: Mapping[str, Mapping[str, object]],
    *,
    device: str = "tpu_v6_lite",
    op: str = V1_OP,
) -> Path:
    """A cache file ``<device>/<op>.json``; keys are the JSON text of arguments."""
    path = folder / device / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1), "utf-8")
    return path


def write_result(
    path: Path,
    pairs: list[tuple[dict[str, object], Mapping[str, object]]],
    *,
    device_kind: str = "TPU v6 lite",
    op: str = V1_CLASS,
) -> Path:
    """An ``AutotuningResult`` file."""
    data = [[{"op": {"__type": op}, "arguments": call}, configs] for call, configs in pairs]
    text = {"device_kind": device_kind, "data": data, "tokamax_version": "0.0.17"}
    path.write_text(json.dumps(text, indent=1), "utf-8")
    return path


def moe_entry(m: int, n: int, k: int, **other: int) -> dict[str, int]:
    """One entry of a fused-MoE file."""
    blocks = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1}
    return {**blocks, "num_warps": 4, "num_stages": 3, **other}


VLLM_DEVICES = ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H200", "NVIDIA_A100-SXM4-80GB", "NVIDIA_B200")
VLLM_VARIANTS = (
    (8, 14336, None, None),
    (8, 1792, "fp8_w8a8", None),
    (64, 1408, "int8_w8a16", None),
    (128, 768, "int4_w4a16", None),
    (256, 128, "fp8_w8a8", "[128,128]"),
)


def write_vllm_files(folder: Path) -> list[Path]:
    """Twenty files: five kinds of model and quantization on four GPUs."""
    paths = []
    for device in VLLM_DEVICES:
        for experts, size, dtype, block in VLLM_VARIANTS:
            name = f"E={experts},N={size},device_name={device}"
            name += f",dtype={dtype}" if dtype else ""
            name += f",block_shape={block}" if block else ""
            body: dict[str, object] = {
                str(tokens): moe_entry(16 if tokens < 64 else 128, 128, 64)
                for tokens in (1, 2, 16, 64, 512, 4096)
            }
            if device == "NVIDIA_B200":
                body = {"triton_version": "3.5.0", **body}
            path = folder / f"{name}.json"
            path.write_text(json.dumps(body, indent=4), "utf-8")
            paths.append(path)
    return paths


MEGABLOX = """\
# Tile sizes of the grouped matmul.
WIDE = 256 * 8
TUNED_BLOCK_SIZES = {
    # m, k, n, groups, local groups, lhs, rhs, quantization block
    (128, 2560, 5120, 160, 20, 'bfloat16', 'float8_e4m3fn', 2560): (128, 256 * 10, 256 * 20),
    (4096, 2048, 768, 128, 16, 'bfloat16', 'bfloat16', 2048): (512, WIDE, 768),
    (4096, 2048, 768, 128, 16, 'bfloat16', 'int8', 512): (512, 2048, 768),
}

def get_tuned(*key):
    raise RuntimeError("never executed")
"""

RPA_V3 = """\
TUNED_BLOCK_SIZES: dict = {
    'TPU v7': {
        128: {
            'q_bfloat16_kv_float8_e4m3fn': {
                'q_head-8_kv_head-4_head-256': {
                    'max_model_len-2048-sw-None': (16, 32),
                    'max_model_len-4096-sw-1024': (16, 8),
                },
            },
        },
    },
    'TPU v6e': {
        64: {'q_bfloat16_kv_bfloat16': {'q_head-32_kv_head-8_head-128': {
            'max_model_len-8192-sw-None': (4, 64),
        }}},
    },
}
"""

RPA_V2 = """\
TUNED_BLOCK_SIZES = {
    'TPU v6e': {('bfloat16', 'bfloat16', 32, 8, 128, 128, 1024, 4096): (16, 32)},
    'TPU v5e': {('bfloat16', 'bfloat16', 32, 8, 128, 16, 1024, 4096): (128, 32)},
}
"""

QUANTIZED_MATMUL = """\
TUNED_BLOCK_SIZES_RAW = {
    (6, 1024, 1280, 8192, 'int8', 'int8'): (1024, 256, 8192),
    (7, 1024, 1280, 8192, 'float8_e4m3fn', 'float8_e4m3fn'): (1024, 256, 8192, 2),
}
"""

FUSED_MOE = """\
import jax.numpy as jnp
TUNED = {
    (4096, 1536, 128, 8, 2, 4, 64, 8): (16, 256, 256, 256, 16, 256, 256, 256),
}
TUNED_PARAMS = {
    TuningKey(num_heads=8, dtype=jnp.bfloat16): TunableParams(bq=128, bkv=256),
}
"""

TPU_INFERENCE = {
    "megablox/tuned_block_sizes.py": MEGABLOX,
    "ragged_paged_attention/v3/tuned_block_sizes.py": RPA_V3,
    "ragged_paged_attention/v2/tuned_block_sizes.py": RPA_V2,
    "quantized_matmul/tuned_block_sizes.py": QUANTIZED_MATMUL,
    "fused_moe/v1/tuned_block_sizes.py": FUSED_MOE,
}
"""Five table files, by their paths below ``tpu_inference/kernels``."""


def write_tpu_inference(folder: Path) -> Path:
    """All five table files below a folder."""
    for name, text in TPU_INFERENCE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder
