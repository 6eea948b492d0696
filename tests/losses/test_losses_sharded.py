"""The losses on eight devices: same numbers, tokens and head stay where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tilepolicy.losses.layout import LossSharding

HERE = Path(__file__).parent
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FSDP = {"mesh": {"fsdp": 8}, "tokens": ["fsdp"], "head": ["fsdp", None]}
TENSOR = {
    "mesh": {"fsdp": 4, "tensor": 2},
    "tokens": ["fsdp"],
    "head": ["fsdp", "tensor"],
}
THREE = {
    "mesh": {"data": 2, "fsdp": 2, "expert": 2},
    "tokens": [["data", "fsdp", "expert"]],
    "head": [["fsdp", "expert"], None],
}
CONTEXT = {
    "mesh": {"fsdp": 4, "context": 2},
    "tokens": ["fsdp", "context"],
    "head": [["fsdp", "context"], None],
}
TIED = {
    "mesh": {"fsdp": 4, "tensor": 2},
    "tokens": ["fsdp"],
    "head": ["tensor", "fsdp"],
    "tied": True,
    "bias": True,
}
CASES: dict[str, dict[str, Any]] = {
    "chunked fsdp": {"loss": "chunked", **FSDP},
    "chunked fsdp each": {"loss": "chunked", "once": [False, False], **FSDP},
    "chunked fsdp reduced each": {"loss": "chunked", "once": [True, False], **FSDP},
    "chunked tensor": {"loss": "chunked", **TENSOR},
    "chunked three": {"loss": "chunked", **THREE},
    "chunked context": {"loss": "chunked", **CONTEXT},
    "chunked tied": {"loss": "chunked", **TIED},
    "online fsdp": {"loss": "online", **FSDP},
    "online fsdp each": {"loss": "online", "once": [False, False], **FSDP},
    "online tensor": {"loss": "online", **TENSOR},
    "online three": {"loss": "online", **THREE},
    "online tied": {"loss": "online", **TIED},
    "adaptive tensor": {"loss": "adaptive", **TENSOR},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """The report of every case, from one process with eight devices."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(HERE),
    }
    done = subprocess.run(
        [sys.executable, HERE / "losses_on_eight_devices.py", json.dumps(CASES)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", CASES)
def test_sharded_losses_are_those_of_one_device(reports: dict[str, Any], name: str) -> None:
    """Sums and gradients match the float64 reference, whatever axes shard tokens and head."""
    assert reports[name]["error"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_tokens_stay_on_their_devices(reports: dict[str, Any], name: str) -> None:
    """No hidden state moves to another device, neither for a chunk nor for its gradient."""
    moved = [c for c in reports[name]["collectives"] if c.startswith("all-to-all")]
    permuted = [c for c in reports[name]["collectives"] if c.startswith("collective-permute")]
    assert (moved, permuted) == ([], [])


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("fsdp each")])
def test_the_head_is_gathered_once(reports: dict[str, Any], name: str) -> None:
    """With ``ag_once`` the program has one all-gather of the head, outside of every loop."""
    gathers = [c for c in reports[name]["collectives"] if c.startswith("all-gather")]
    assert len(gathers) == 1, gathers


def test_sharding_sizes_follow_the_specs() -> None:
    """Axes of the tokens are gathered, the others keep dividing the vocabulary."""
    mesh = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AUTO,) * 3)
    sharding = LossSharding(mesh, P(("data", "fsdp")), P("fsdp", "tensor"))  # type: ignore[arg-type]  # abstract will do
    assert sharding.token_shards == 8
    assert sharding.vocab_shards(1) == 2
    assert sharding.head_shards == 4


@pytest.mark.parametrize(
    ("kind", "tokens", "head", "error", "text"),
    [
        (AUTO, "fsdp", P("fsdp"), TypeError, "tokens and head are PartitionSpecs, got 'fsdp'"),
        (AUTO, P("fsdp"), "fsdp", TypeError, "tokens and head are PartitionSpecs, got 'fsdp'"),
        (AUTO, P("data"), P("fsdp"), ValueError, r"names \['data'\], the mesh has \['fsdp'\]"),
        (EXPLICIT, P("fsdp"), P(), ValueError, r"names the explicit axes \['fsdp'\]: make the mes"),
    ],
)
def test_wrong_shardings_are_explained(
    kind: AxisType, tokens: Any, head: Any, error: type[Exception], text: str
) -> None:
    """Specs are checked against the mesh; explicit axes, ``jax.make_mesh``'s default, are named."""
    mesh: Any = AbstractMesh((4,), ("fsdp",), axis_types=(kind,))
    with pytest.raises(error, match=text):
        LossSharding(mesh, tokens, head)
