"""A verify report as JSON of a stable shape, and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tilepolicy.report import Block, Cell, Column, Lines, Row, Table, origin_text, problem_json
from tilepolicy.settings import AXES, Layer
from tilepolicy.tuning.smaller import Suggestion
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.verify import DeviceReport, SiteReport, VerifyReport

__all__ = ["VERIFY_JSON_VERSION", "verify_blocks", "verify_json"]

VERIFY_JSON_VERSION: Final = 1
_MIB: Final = 1024 * 1024

_COLUMNS: Final = (
    Column("site"),
    Column("tile"),
    Column("verdict"),
    Column("VMEM MiB", right=True),
    Column("compile s", right=True),
    Column("MB accessed", right=True),
    Column("roofline ms", right=True),
    Column("tile from", wrap=True),
)
_STYLES: Final = {"fits": "green"}


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """Plain JSON data; keys are only ever added within one ``version``."""
    return {
        "version": VERIFY_JSON_VERSION,
        "ok": report.ok,
        "config": report.config,
        "policy": {
            "name": report.policy.name,
            "digest": report.policy.digest,
            "files": list(report.policy.files),
        },
        "libraries": dict(report.libraries),
        "devices": [_device_json(device) for device in report.devices],
    }


def _device_json(device: DeviceReport) -> dict[str, Any]:
    return {
        "device": device.device,
        "ok": device.ok,
        "notes": list(device.notes),
        "problems": [problem_json(problem) for problem in device.problems],
        "sites": [_site_json(site) for site in device.sites],
    }


def _site_json(report: SiteReport) -> dict[str, Any]:
    target, verdict = report.target, report.verdict
    site, asked = target.site, target.request.tile
    return {
        "role": target.role,
        "layer": site.layer,
        "pass": site.pass_,
        "phase": site.phase,
        "backend": site.backend,
        "sizes": {
            "rows": target.rows,
            "batch_seq": site.batch_seq,
            "embed_dim": site.embed_dim,
            "mlp_dim": site.mlp_dim,
            "num_groups": site.num_groups,
        },
        "dtype": site.dtype,
        "weight_dtype": site.weights,
        "tile": asked.to_policy(site.layer) if asked is not None else None,
        "origin": {
            field: {
                "kind": choice.origin.kind,
                "name": choice.origin.name,
                "file": choice.origin.file,
                "line": choice.origin.line,
                "reason": choice.origin.reason,
            }
            for field, choice in target.choices.items()
        },
        "outcome": report.outcome,
        "message": verdict.message,
        "compiled_tile": verdict.tile.to_policy(site.layer) if verdict.tile is not None else None,
        "vmem": {"used_bytes": verdict.used_bytes, "available_bytes": verdict.available_bytes},
        "compile_seconds": round(verdict.compile_seconds, 3),
        "temp_bytes": verdict.temp_bytes,
        "bytes_accessed": verdict.bytes_accessed,
        "roofline_seconds": verdict.roofline_seconds,
        "kernel": {"flops": verdict.kernel_flops, "bytes_accessed": verdict.kernel_bytes},
        "suggestions": [
            _suggestion_json(s, site.layer) for s in (report.smaller, report.higher) if s
        ],
    }


def _suggestion_json(suggestion: Suggestion, layer: Layer) -> dict[str, Any]:
    return {
        "tile": suggestion.tile.to_policy(layer),
        "changed": list(suggestion.changed(layer)),
        "scoped_vmem_limit_kib": suggestion.scoped_vmem_limit_kib,
        "used_bytes": suggestion.verdict.used_bytes,
        "roofline_seconds": suggestion.verdict.roofline_seconds,
    }


def verify_blocks(report: VerifyReport) -> tuple[Block, ...]:
    """The report for reading: one table per device, and what to change below it."""
    policy = report.policy
    libraries = ", ".join(f"{name} {version}" for name, version in report.libraries.items())
    blocks: list[Block] = [
        Lines((report.config,), style="bold"),
        Lines((f"policy   {policy.name} {policy.digest[:12]}", f"compiler {libraries}")),
    ]
    for device in report.devices:
        blocks += _device_blocks(device)
    blocks.append(Lines((_summary(report),), style="green" if report.ok else "red"))
    return tuple(blocks)


def _device_blocks(device: DeviceReport) -> Iterator[Block]:
    yield Lines((f"{device.device}  {tpu(device.device).kind}",), style="bold")
    if device.sites:
        yield Table(_COLUMNS, tuple(_row(site) for site in device.sites))
    for note in device.notes:
        yield Lines((note,), style="dim")
    for problem in device.problems:
        yield Lines(tuple(str(problem).splitlines()), style="yellow")


def _row(report: SiteReport) -> Row:
    target, verdict = report.target, report.verdict
    shown = target.request.tile or verdict.tile
    cells = (
        Cell(target.name),
        Cell(_tile_text(shown.to_policy(target.site.layer)) if shown is not None else "-"),
        Cell(report.outcome, _STYLES.get(report.outcome, "red")),
        Cell(_vmem_text(verdict.used_bytes, verdict.available_bytes)),
        Cell(f"{verdict.compile_seconds:.1f}"),
        Cell(_scaled(verdict.bytes_accessed, 1e-6, ".0f")),
        Cell(_scaled(verdict.roofline_seconds, 1e3, ".3f")),
        Cell(_origins(report)),
    )
    return Row(cells, tuple(_details(report)))


def _details(report: SiteReport) -> Iterator[str]:
    verdict = report.verdict
    if report.outcome == "other-tile" and verdict.tile is not None:
        layer = report.target.site.layer
        yield f"the compiled kernel has {_tile_text(verdict.tile.to_policy(layer))}"
    elif not report.ok and verdict.message:
        yield verdict.message
    if (smaller := report.smaller) is not None:
        layer = report.target.site.layer
        sizes = smaller.tile.to_policy(layer)
        changes = ", ".join(f"{axis}: {sizes[axis]}" for axis in smaller.changed(layer))
        vmem = _vmem_text(smaller.verdict.used_bytes, smaller.verdict.available_bytes)
        yield f"smallest change that fits: {changes} ({vmem} MiB{_slower(report)})"
    if (higher := report.higher) is not None:
        limit = higher.scoped_vmem_limit_kib
        yield f"or leave the tile and set --xla_tpu_scoped_vmem_limit_kib={limit}"
    if not report.ok and report.smaller is None and verdict.status == "does-not-fit":
        yield "no smaller tile that was tried fits; `tilepolicy tune` searches further"


def _slower(report: SiteReport) -> str:
    """Roofline of the smaller tile against that of the tile that needs a higher limit."""
    if report.smaller is None or report.higher is None:
        return ""
    small, big = report.smaller.verdict.roofline_seconds, report.higher.verdict.roofline_seconds
    if not small or not big:
        return ""
    return f", roofline {small * 1e3:.3f} ms against {big * 1e3:.3f} ms"


def _origins(report: SiteReport) -> str:
    """Where the axes of the tile come from, each origin once."""
    choices = report.target.choices
    if report.target.request.tile is None:
        return "the kernel's own choice"
    texts: dict[str, list[str]] = {}
    for axis in AXES:
        origin = choices[axis].origin
        text = f"{origin.kind} {origin_text(origin, full=False)}".strip()
        texts.setdefault(text, []).append(axis)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{', '.join(axes)}: {text}" for text, axes in texts.items())


def _summary(report: VerifyReport) -> str:
    sites = [site for device in report.devices for site in device.sites]
    failed = [
        f"{site.target.name} on {device.device}"
        for device in report.devices
        for site in device.sites
        if not site.ok
    ]
    if failed:
        return f"{len(failed)} of {len(sites)} sites fail: {', '.join(failed)}"
    unresolved = [device.device for device in report.devices if not device.ok]
    if unresolved:
        return f"all {len(sites)} sites fit, but the config does not resolve (see the problems)"
    return f"all {len(sites)} sites fit" if sites else "no grouped-matmul kernel to compile"


def _tile_text(tile: Mapping[str, int]) -> str:
    return " x ".join(str(tile[axis]) for axis in AXES)


def _vmem_text(used: int | None, available: int | None) -> str:
    texts: Iterable[str] = (_scaled(size, 1 / _MIB, ".1f") for size in (used, available))
    return " / ".join(texts)


def _scaled(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(value * factor, form)
