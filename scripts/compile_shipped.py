"""Compile every tile that the shipped tpu-* policies resolve, with the TPU compiler, offline.

Usage: ``python scripts/compile_shipped.py --journal FILE [--device v6e] [--jobs 2] [--sample N]``

The calls are the measured ones and those of MaxText's MoE models, as both layers, in all passes;
each kernel is compiled once. Of the points between them, one call is compiled for each kernel form
(:mod:`tilepolicy.formats.refused`) that none of these has. Calls whose operands do not fit into a
device's HBM are counted and left out.

The journal holds the verdicts as JSON lines: an interrupted run goes on where it stopped. Takes
hours on two cores. Prints a summary as Markdown; the exit code is 1 if a tile does not compile, or
a call gets none.

With ``--keep-refused`` the tiles that exceed VMEM are added to ``scripts/refused_tiles.json``,
which ``scripts/make_tpu_policies.py`` reads: write the policies anew and run this again until all
compile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from tilepolicy import policy
from tilepolicy.axes import GmmShape, forward_axes, layer_facts
from tilepolicy.formats.model_sites import model_sites
from tilepolicy.formats.refused import KernelForm, RefusedTiles
from tilepolicy.formats.tokamax_cache import shipped_caches
from tilepolicy.formats.tpu_tables import CACHES, has_room, read_measured
from tilepolicy.resolution import FactValue
from tilepolicy.settings import LAYERS, PASSES, Layer, Pass
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.journal import Journal, library_versions
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS

REFUSED = Path(__file__).resolve().parent / "refused_tiles.json"


@dataclass(frozen=True, slots=True)
class Call:
    """One call whose tile is resolved.

    Attributes:
        device: policy name.
        layer: ``wi`` or ``wo``.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        shape: its forward problem.
        origin: ``measured``, ``model`` or ``between``.
    """

    device: str
    layer: Layer
    pass_: Pass
    shape: GmmShape
    origin: str


@cache
def shipped(device: str) -> policy.Policy:
    """The shipped policy of a device."""
    return policy.load(f"tpu-{device}")


def calls(device: str) -> Iterator[Call]:
    """Every call of a device that the policies should serve: measured ones, then the models'."""
    for layer in LAYERS:
        for one in read_measured(shipped_caches(), device):
            yield Call(device, layer, one.pass_, one.shape, "measured")
    for layer, shapes in model_sites().items():
        for shape in sorted(shapes, key=lambda s: (s.m, s.k, s.n, s.g)):
            for pass_ in PASSES:
                yield Call(device, layer, pass_, shape, "model")


def points(device: str) -> Iterator[Call]:
    """The call of every point of a shipped policy."""
    for rule in shipped(device).document.gmm.rules:
        conditions = dict(rule.when)
        for layer, pass_ in itertools.product(LAYERS, PASSES):
            if (str(conditions["layer"]), str(conditions["pass"])) == (layer, pass_):
                for point in rule.table.points if rule.table is not None else ():
                    yield Call(device, layer, pass_, _shape(point.at, layer), "between")


def _shape(at: Mapping[str, int], layer: Layer) -> GmmShape:
    m, k, n = (at[axis] for axis in forward_axes(layer))
    return GmmShape(m, k, n, at["num_groups"])


def form_of(request: CompileRequest) -> KernelForm:
    """What decides how much VMEM a request's kernel takes."""
    site, tile, buffers = request.site, request.tile, request.options.input_buffer_count
    if tile is None or buffers is None:
        raise ValueError("a shipped tile has all axes and its number of buffers")
    return KernelForm.of(request.device, site.pass_, site.shape, tile, buffers)


def with_other_forms(
    asked: Mapping[Call, CompileRequest | None], device: str
) -> dict[Call, CompileRequest | None]:
    """The calls of a device, and one between them for each kernel form that none of them has."""
    every = dict(asked)
    forms = {form_of(request) for request in asked.values() if request is not None}
    for call in points(device):
        request = request_of(call)
        if request is None:
            every[call] = None
        elif (form := form_of(request)) not in forms:
            every[call] = request
            forms.add(form)
    return every


def request_of(call: Call) -> CompileRequest | None:
    """What the shipped policy resolves for a call, as a request; None when no rule serves it.

    The kernel does not know its layer: equal problems of both layers are one request, as wi.
    """
    facts: dict[str, FactValue] = {
        "device": call.device,
        "backend": "tokamax_v1",
        "layer": call.layer,
        "pass": call.pass_,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        **layer_facts(call.shape, call.layer),
    }
    tile = shipped(call.device).gmm.lookup(facts).tile
    if not tile:
        return None
    values = {name: int(choice.value or 0) for name, choice in tile.items()}
    shape = call.shape
    return CompileRequest(
        site=Site("wi", call.pass_, shape.m, shape.k, shape.n, shape.g),
        device=call.device,
        tile=GmmTile.of_policy(call.layer, values),
        options=KernelOptions(input_buffer_count=values["input_buffer_count"]),
    )


def summary(
    asked: Mapping[Call, CompileRequest | None],
    found: Mapping[str, CompileVerdict],
    without_room: Mapping[str, int],
) -> str:
    """Markdown: calls, kernels and how many compiled, by device."""
    lines = [
        "| device | calls | no room in HBM | served | kernels | compiled | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for device, left_out in without_room.items():
        mine = {call: request for call, request in asked.items() if call.device == device}
        requests = {r.identity for r in mine.values() if r is not None}
        verdicts = [found[identity] for identity in requests if identity in found]
        fits = sum(verdict.fits for verdict in verdicts)
        served = sum(request is not None for request in mine.values())
        lines.append(
            f"| {device} | {len(mine)} | {left_out} | {served} | {len(requests)} | {fits} "
            f"| {len(verdicts) - fits} |"
        )
    return "\n".join(lines)


def _progress(verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
    if not known:
        request = verdict.request
        print(
            f"{done}/{total} {request.device} {request.site.pass_} {request.site.shape} "
            f"{request.tile}: {verdict.status} {verdict.message}",
            file=sys.stderr,
            flush=True,
        )


def _in_turn(requests: Iterable[CompileRequest]) -> list[CompileRequest]:
    """Each kernel once, the devices taking turns, so that part of a run says something of all."""
    by_device: dict[str, dict[str, CompileRequest]] = {}
    for request in requests:
        by_device.setdefault(request.device, {}).setdefault(request.identity, request)
    turns = zip_longest(*(mine.values() for mine in by_device.values()))
    return [request for turn in turns for request in turn if request is not None]


def _sampled(requests: Sequence[CompileRequest], count: int | None) -> list[CompileRequest]:
    """Every n-th request, so that all devices and passes are in the sample."""
    if count is None or count >= len(requests):
        return list(requests)
    return [requests[at * len(requests) // count] for at in range(count)]


def main() -> int:
    """Resolve, compile, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=Path, required=True, help="JSON lines of verdicts")
    parser.add_argument("--device", choices=list(CACHES), action="append")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one compile")
    parser.add_argument("--sample", type=int, help="compile only so many kernels")
    parser.add_argument(
        "--keep-refused", action="store_true", help=f"add what exceeds VMEM to {REFUSED.name}"
    )
    options = parser.parse_args()
    devices = options.device or list(CACHES)
    every = {device: list(calls(device)) for device in devices}
    fitting = {
        device: [call for call in mine if has_room(call.shape, TPUS[device])]
        for device, mine in every.items()
    }
    asked: dict[Call, CompileRequest | None] = {}
    for device, mine in fitting.items():
        asked |= with_other_forms({call: request_of(call) for call in mine}, device)
    wanted = _in_turn([r for r in asked.values() if r is not None])
    with Journal(options.journal) as journal:
        compiler = Compiler(
            jobs=options.jobs,
            timeout_seconds=options.timeout,
            journal=journal,
            progress=_progress,
        )
        found = compiler.verdicts(_sampled(wanted, options.sample))
    print(summary(asked, found, {d: len(every[d]) - len(fitting[d]) for d in devices}))
    if options.keep_refused:
        kept = RefusedTiles.read(REFUSED).with_verdicts(found.values())
        kept.write(REFUSED, library_versions())
    for verdict in found.values():
        if not verdict.fits:
            request = verdict.request
            print(
                f"- {request.device} {request.site.pass_} {request.site.shape} {request.tile}: "
                f"{verdict.status}: {verdict.message}"
            )
    missed = [call for call, request in asked.items() if request is None]
    for call in missed:
        print(f"- no tile for {call}")
    return 1 if missed or not all(verdict.fits for verdict in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
