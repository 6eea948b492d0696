"""One door to all formats: a name and a source give a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from tilepolicy.errors import Place, Problem
from tilepolicy.formats.fused_moe import read_fused_moe
from tilepolicy.formats.jsontext import parse, read
from tilepolicy.formats.records import FormatError, ImportReport
from tilepolicy.formats.tokamax_cache import read_cache_directory, read_cache_file
from tilepolicy.formats.tokamax_entries import DlhsNames
from tilepolicy.formats.tokamax_result import is_result, read_result
from tilepolicy.formats.tpu_inference import read_tpu_inference

__all__ = ["FORMATS", "Format", "SourceOptions", "read_source"]

Format = Literal["tokamax", "vllm", "sglang", "tpu-inference"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a source may not say itself.

    Attributes:
        device: policy name of the device; filters directories of several devices.
        op: glob for Tokamax ops.
        dlhs_names: what Tokamax v1 dlhs entries call ``tile_k``.
        top_k: experts of a token, for vLLM and SGLang.
    """

    device: str | None = None
    op: str = "*ragged_dot"
    dlhs_names: DlhsNames = "auto"
    top_k: int | None = None


def read_source(format_: Format, path: Path, options: SourceOptions) -> ImportReport:
    """Read a file or directory.

    Args:
        format_: one of :data:`FORMATS`.
        path: file or directory.
        options: what the source does not say itself.

    Raises:
        FormatError: there is nothing to read, or a needed option is missing.
    """
    if not path.exists():
        problem = Problem("no-file", "there is no such file or directory", Place(str(path)))
        raise FormatError(problem)
    match format_:
        case "tokamax":
            return _read_tokamax(path, options)
        case "tpu-inference":
            return read_tpu_inference(path, device=options.device)
        case "vllm" | "sglang":
            if options.top_k is None:
                message = (
                    "these files count tokens, Tokamax's rows are tokens times the experts of a "
                    "token, which the files do not say"
                )
                remedy = "give it: --top-k 2 (num_experts_per_tok of the model)"
                raise FormatError(Problem("no-top-k", message, Place(str(path)), remedy))
            return read_fused_moe(path, format_, top_k=options.top_k)


def _read_tokamax(path: Path, options: SourceOptions) -> ImportReport:
    if path.is_dir():
        return read_cache_directory(
            path, op=options.op, device=options.device, dlhs_names=options.dlhs_names
        )
    source = read(path)
    if is_result(parse(source)):
        return read_result(path, dlhs_names=options.dlhs_names, source=source)
    return read_cache_file(
        path, device=options.device, dlhs_names=options.dlhs_names, source=source
    )
