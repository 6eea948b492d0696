"""Host time of a training-engine step, plain and under a policy, for each MaxText at hand.

    python benchmarks/host_dispatch.py [--layers 28] [--also PYTHON]…

Measures the installed MaxText (0.2.4 or 0.2.5) on an unrolled model; ``--also`` names the Python of
another environment to measure too (``scripts/maxtext_versions.py`` makes both). The kernels are
replaced by functions that hand their arrays back, so that a step is nothing but what the host does:
reading the state out of the model, dispatch, writing it back, bookkeeping. Plain and policy take
turns in blocks on the same engine, in alternating order; each figure is the median over the steps
of all blocks, in CPU time of this one thread, so that other work on the machine does not count.

``split`` is what it costs to get the state as arrays: ``nnx.split`` in plain 0.2.4; under the
policy the checks, and what is kept after each ``nnx.update``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from tilepolicy.adapters.maxtext_types import Foreign

MIN_FACTOR = 45
MAX_OVERHEAD = 0.01
BLOCKS, STEPS = 10, 10

CONFIG = (
    "run_name=t base_output_directory=/nowhere model_name=default dataset_type=synthetic "
    "enable_checkpointing=False enable_goodput_recording=False enable_tensorboard=False "
    "skip_jax_distributed_system=True hardware=cpu attention=dot_product log_config=False "
    "per_device_batch_size=1 max_target_length=16 vocab_size=64 base_emb_dim=16 base_mlp_dim=16 "
    "base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 scan_layers=False"
)


class Timed:
    """``flax.nnx`` as the engine sees it, with the time spent in two of its functions."""

    def __init__(self, nnx: Foreign) -> None:
        self._nnx = nnx
        self.seconds = {"split": 0.0, "update": 0.0}

    def __getattr__(self, name: str) -> Foreign:
        value = getattr(self._nnx, name)
        if name not in self.seconds:
            return value

        def timed(*args: Foreign, **kwargs: Foreign) -> Foreign:
            start = time.thread_time()
            try:
                return value(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start

        return timed


def engine(layers: int) -> Foreign:
    """A training engine on an unrolled model, its kernels handing back what they are given."""
    import jax
    import maxtext
    from flax import nnx
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.training_engine import maxtext_engine
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    arguments = [*CONFIG.split(), f"base_num_decoder_layers={layers}"]
    config = pyconfig.initialize(["train.py", str(base), *arguments])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)

    def eagerly(**_: Foreign) -> Foreign:
        """Compiling the initialisation of so many layers takes minutes and is not measured."""
        return model_creation_utils.from_config(
            config, mesh=mesh, model_mode=MODEL_MODE_TRAIN, rngs=nnx.Rngs(0)
        )

    maxtext_engine.model_creation_utils.from_pretrained = eagerly
    with jax.set_mesh(mesh):
        made = maxtext_engine.MaxTextTrainingEngine(config, mesh)
        if not isinstance(made.optimizer, nnx.Optimizer):  # 0.2.4 leaves the optax one
            made.optimizer = nnx.Optimizer(made.model, made.optimizer, wrt=nnx.Param)
    loss = jax.numpy.zeros(())

    def forward(params: Foreign, rest: Foreign, *_: Foreign) -> Foreign:
        results = (loss, {}, _new(rest), params)
        return results if version("maxtext") == "0.2.4" else (*results, loss)

    def update(state: Foreign, *_: Foreign) -> Foreign:
        return _new(state), None, None

    made._fwd_bwd_kernel = made._compiled_fwd_bwd = forward
    made._update_kernel = made._compiled_update = update
    made._compiled = True
    return made


def _new(tree: Foreign) -> Foreign:
    """The same values in new containers and variables, as a compiled kernel returns them."""
    import jax

    return jax.tree.map(lambda leaf: leaf, tree)


def _stand_in_for_tunix() -> None:
    """0.2.5's engine imports types of Tunix that no release on PyPI has."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "maxtext"))
    import tunix_stand_in

    tunix_stand_in.install()


def measure(layers: int) -> dict[str, Foreign]:
    """Medians of a step with and without a policy, for the installed MaxText."""
    _stand_in_for_tunix()
    import maxtext.training_engine.maxtext_engine as module

    import tilepolicy

    made = engine(layers)
    inner = module.nnx = Timed(module.nnx)
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write("version: 1\nname: cached\nvocab: {loss: upstream}\n")
        file.flush()
        policy = tilepolicy.load(file.name)
    times: dict[str, list[float]] = {name: [] for name in ("plain", "policy")}
    splits: dict[str, list[float]] = {name: [] for name in times}
    notes: dict[str, str] = {}
    # The first steps of a process cost several times the later ones, and the collector meets
    # whichever step makes it start: neither is a side's own.
    _block(made, module, inner, [], [])
    gc.collect()
    gc.freeze()
    for block in range(BLOCKS):
        # Whatever drifts from block to block meets both: the order is turned round each time.
        for name in sorted(times, reverse=block % 2 == 1):
            scope = tilepolicy.apply(policy) if name == "policy" else nullcontext()
            with scope as session:
                _block(made, module, inner, times[name], splits[name])
            if session is not None:
                notes |= {str(note.value): note.reason for note in session.notes}
    return {
        "maxtext": version("maxtext"),
        "layers": layers,
        "step_ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "split_ms": {name: 1e3 * statistics.median(found) for name, found in splits.items()},
        "pairs": [b / a for a, b in zip(times["plain"], times["policy"], strict=True)],
        "notes": notes,
    }


def _block(
    made: Foreign, module: Foreign, inner: Timed, times: list[float], splits: list[float]
) -> None:
    """One block of steps; the first, which may fill a cache, is not counted."""
    seen_by_engine = module.nnx
    outer = module.nnx = seen_by_engine if seen_by_engine is inner else Timed(seen_by_engine)
    if hasattr(made, "_refresh_pure_state"):
        made._state = made.state
        made._refresh_pure_state()
    step = _step(made)
    step()
    for _ in range(STEPS):
        for timed in (inner, outer):
            timed.seconds.update(split=0.0, update=0.0)
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
        cost = outer.seconds["split"] + outer.seconds["update"] - inner.seconds["update"]
        splits.append(cost)
    module.nnx = seen_by_engine


def _step(made: Foreign) -> Callable[[], None]:
    def step() -> None:
        made.fwd_bwd({})
        made.update()
        made.get_metrics(clear_cache=True)

    return step


def show(found: dict[str, Foreign]) -> bool:
    """Print the figures of one MaxText; whether they are what is claimed."""
    step, split = found["step_ms"], found["split_ms"]
    release = found["maxtext"]
    print(f"maxtext {release}, {found['layers']} layers, unrolled")
    print(f"  host time per step   plain {step['plain']:8.2f} ms   policy {step['policy']:8.2f} ms")
    print(
        f"  of which split       plain {split['plain']:8.2f} ms   policy {split['policy']:8.2f} ms"
    )
    for value, reason in found["notes"].items():
        print(f"  report: engine.cache_pure_state = {value} ({reason})")
    if release == "0.2.4":
        factor = split["plain"] / split["policy"]
        print(f"  split cost divided by {factor:.0f} (at least {MIN_FACTOR})")
        return factor >= MIN_FACTOR
    overhead = statistics.median(found["pairs"]) - 1
    print(f"  the policy adds {100 * overhead:.2f} % (at most {100 * MAX_OVERHEAD:.0f} %)")
    return overhead <= MAX_OVERHEAD


def main() -> int:
    """Measure here and in the other environments, print, and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--also", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", DECOUPLE_GCLOUD="TRUE", TPU_SKIP_MDS_QUERY="1")
    warnings.simplefilter("ignore")
    if options.json:
        print(json.dumps(measure(options.layers)))
        return 0
    fine = True
    for python in (sys.executable, *options.also):
        command = [python, __file__, "--json", "--layers", str(options.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return done.returncode
        fine &= show(json.loads(done.stdout.splitlines()[-1]))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
