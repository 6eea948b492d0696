"""What the tests of scopes share: policies, a two-layer MoE block, TPU meshes that are not there.

Importing this module imports jax and Tokamax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tokamax
import yaml
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import tilepolicy
from tilepolicy.policy import Policy

DEVICE_KINDS = {"v5p": "TPU v5", "v6e": "TPU v6 lite", "v7x": "TPU7x"}
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}

type Tile = Mapping[str, int]
type Tiles = Mapping[tuple[str, str], Tile]

# Six different tiles; all legal for dimensions of 512 and more.
SIX: Tiles = {
    ("wi", "fwd"): {"batch_seq": 128, "embed_dim": 256, "mlp_dim": 128},
    ("wi", "dlhs"): {"batch_seq": 256, "embed_dim": 128, "mlp_dim": 128},
    ("wi", "drhs"): {"batch_seq": 128, "embed_dim": 256, "mlp_dim": 256},
    ("wo", "fwd"): {"batch_seq": 512, "embed_dim": 256, "mlp_dim": 128},
    ("wo", "dlhs"): {"batch_seq": 512, "embed_dim": 128, "mlp_dim": 256},
    ("wo", "drhs"): {"batch_seq": 256, "embed_dim": 256, "mlp_dim": 512},
}


def document(tiles: Tiles, name: str = "six", **sections: Any) -> dict[str, Any]:
    """A policy with one rule per layer and pass."""
    rules = [
        {"name": f"{layer} {pass_}", "when": {"layer": layer, "pass": pass_}, "tile": dict(tile)}
        for (layer, pass_), tile in tiles.items()
    ]
    return {"version": 1, "name": name, "gmm": {"rules": rules}} | sections


def write(folder: Path, content: Mapping[str, Any], name: str = "policy.yml") -> Path:
    """A policy file."""
    path = folder / name
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False))
    return path


def load(folder: Path, content: Mapping[str, Any], name: str = "policy.yml") -> Policy:
    """A policy, through a file."""
    return tilepolicy.load(write(folder, content, name))


@contextmanager
def tpu(device: str = "v6e") -> Iterator[None]:
    """Trace for a TPU that is not there, without its compiler."""
    kind = AbstractDevice(device_kind=DEVICE_KINDS[device], num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh), tokamax.config.cross_compile(True):
        yield


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def gmm_arguments(m: int = 512, k: int = 512, n: int = 1024, g: int = 4) -> tuple[Any, ...]:
    """lhs [m, k], rhs [g, k, n], group sizes [g]."""
    return array(m, k), array(g, k, n), array(g, dtype=jnp.int32)


def gmm(x: Any, w: Any, sizes: Any, implementation: Any = "mosaic_tpu") -> Any:
    """One grouped matmul that nothing tags."""
    return tokamax.ragged_dot(x, w, sizes, implementation=implementation)


def tagged_moe(x: Any, gate: Any, up: Any, down: Any, sizes: Any, implementation: Any) -> Any:
    """Gate, the two wi matmuls and wo, with layer tags."""
    with tilepolicy.layer("wi"):
        hidden = jax.nn.silu(gmm(x, gate, sizes, implementation))
        hidden = hidden * gmm(x, up, sizes, implementation)
    with tilepolicy.layer("wo"):
        return gmm(hidden, down, sizes, implementation)


def plain_moe(x: Any, gate: Any, up: Any, down: Any, sizes: Any, implementation: Any) -> Any:
    """The same without tags: only sizes or function names can tell the layers."""
    return _down(_up(x, gate, up, sizes, implementation), down, sizes, implementation)


def _up(x: Any, gate: Any, up: Any, sizes: Any, implementation: Any) -> Any:
    return jax.nn.silu(gmm(x, gate, sizes, implementation)) * gmm(x, up, sizes, implementation)


def _down(hidden: Any, down: Any, sizes: Any, implementation: Any) -> Any:
    return gmm(hidden, down, sizes, implementation)


def step(moe: Callable[..., Any] = tagged_moe, implementation: Any = "mosaic_tpu") -> Any:
    """Gradient of a two-layer stack: a scan over layers, each under ``jax.checkpoint``."""

    def loss(weights: Any, x: Any, sizes: Any) -> Any:
        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            block = jax.checkpoint(lambda x: x + moe(x, *weights, sizes, implementation))
            return block(x), None

        out, _ = jax.lax.scan(layer, x, weights)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))


def step_arguments(
    m: int = 1024, embed: int = 512, mlp: int = 1024, g: int = 4, make: Any = array
) -> tuple[Any, ...]:
    """Weights of two layers, activations, group sizes."""
    weights = (make(2, g, embed, mlp), make(2, g, embed, mlp), make(2, g, mlp, embed))
    return weights, make(m, embed), make(g, dtype=jnp.int32)


def tiles_by_site(session: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Site to the (tile_m, tile_k, tile_n) that were answered."""
    found: dict[str, set[tuple[Any, ...]]] = {}
    for lookup in session.lookups:
        config = dict(lookup.config)
        tile = tuple(config.get(name) for name in ("tile_m", "tile_k", "tile_n"))
        found.setdefault(lookup.site, set()).add(tile)
    return found


def overlays() -> tuple[Any, ...]:
    """The overlays that a lookup would see here now, and what holds them."""
    from tokamax._src.ops import op

    stack = op.AUTOTUNING_CACHE_OVERLAY_STACK
    return (type(stack).__name__, *stack.get())
