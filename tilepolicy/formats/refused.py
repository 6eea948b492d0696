"""Tiles that the TPU compiler refused, for the generator of the shipped policies.

A measured winner ran where it was measured; the same tile can exceed VMEM for another call, or
with the compiler of today. Such refusals are kept as data next to the generator, so that what is
shipped compiles, and are found by compiling (``scripts/compile_shipped.py``).

How much VMEM a kernel takes depends on its tile, not on its problem, except for what
:class:`KernelForm` names: 1186 kernels compiled with libtpu 0.0.52 have 219 forms, and only in one
of these the sizes differ, by 4 KiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from tilepolicy.axes import GmmShape
from tilepolicy.errors import Place, Problem
from tilepolicy.files import write_atomically
from tilepolicy.formats.records import FormatError
from tilepolicy.settings import Pass
from tilepolicy.tuning.compiler import CompileVerdict
from tilepolicy.tuning.sites import GmmTile

__all__ = ["KernelForm", "RefusedTiles"]


class KernelForm(NamedTuple):
    """What of a v1 kernel in bfloat16 decides how much VMEM it takes.

    Attributes:
        device: policy name.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        tile: tile by forward axes.
        input_buffer_count: buffers of each input.
        k_divides: whether the tile divides k; if not, the last tile is masked.
        n_divides: the same for n.
        whole: whether one tile covers the contracted axis, so that nothing is accumulated.
    """

    device: str
    pass_: Pass
    tile: GmmTile
    input_buffer_count: int
    k_divides: bool
    n_divides: bool
    whole: bool

    @classmethod
    def of(
        cls, device: str, pass_: Pass, shape: GmmShape, tile: GmmTile, input_buffer_count: int
    ) -> Self:
        """The kernel of a call."""
        covered = {"fwd": tile.k >= shape.k, "dlhs": tile.n >= shape.n, "drhs": False}
        divides = shape.k % tile.k == 0, shape.n % tile.n == 0
        return cls(device, pass_, tile, input_buffer_count, *divides, covered[pass_])


@dataclass(frozen=True, slots=True)
class RefusedTiles:
    """Kernels that the compiler refused.

    Attributes:
        kernels: bytes of VMEM that each asked for until the compiler gave up, and the bytes that
            it may use; None where the compiler did not say.
    """

    kernels: Mapping[KernelForm, tuple[int | None, int | None]]

    def __contains__(self, kernel: KernelForm) -> bool:
        return kernel in self.kernels

    @classmethod
    def read(cls, path: Path) -> Self:
        """The refusals in a file; none when there is no file.

        Raises:
            FormatError: the file is not one that :meth:`write` makes.
        """
        if not path.exists():
            return cls({})
        try:
            held = json.loads(path.read_text("utf-8"))
            return cls(dict(_entry(one) for one in held["refused"]))
        except (ValueError, KeyError, TypeError) as error:
            message = f"the file holds no refused tiles: {error}"
            remedy = "delete it, and write it anew: scripts/compile_shipped.py --keep-refused"
            problem = Problem("malformed", message, Place(str(path)), remedy)
            raise FormatError(problem) from error

    def with_verdicts(self, verdicts: Iterable[CompileVerdict]) -> Self:
        """These, and the kernels that exceed VMEM among further verdicts."""
        found = dict(self.kernels)
        for verdict in verdicts:
            request = verdict.request
            buffers = request.options.input_buffer_count
            sizes = verdict.used_bytes, verdict.available_bytes
            if verdict.status != "does-not-fit" or request.tile is None or buffers is None:
                continue
            site = request.site
            form = KernelForm.of(request.device, site.pass_, site.shape, request.tile, buffers)
            found[form] = sizes
        return type(self)(found)

    def write(self, path: Path, libraries: Mapping[str, str]) -> None:
        """Write them, a line each, with the versions of the libraries that refused."""
        lines = ",\n".join(f"    {json.dumps(_json(*one))}" for one in sorted(self.kernels.items()))
        head = f'{{\n  "libraries": {json.dumps(dict(libraries))},\n  "refused": [\n'
        write_atomically(path, f"{head}{lines}\n  ]\n}}\n")


def _json(kernel: KernelForm, sizes: tuple[int | None, int | None]) -> dict[str, Any]:
    fields = kernel._asdict() | {"pass": kernel.pass_, "tile": list(kernel.tile)}
    del fields["pass_"]
    return fields | {"used_bytes": sizes[0], "available_bytes": sizes[1]}


def _entry(data: Mapping[str, Any]) -> tuple[KernelForm, tuple[int | None, int | None]]:
    kernel = KernelForm(
        data["device"],
        data["pass"],
        GmmTile(*data["tile"]),
        data["input_buffer_count"],
        data["k_divides"],
        data["n_divides"],
        data["whole"],
    )
    return kernel, (data["used_bytes"], data["available_bytes"])
