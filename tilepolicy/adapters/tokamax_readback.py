"""What a program really carries: tiles read back from a lowered module or a compiled program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tilepolicy.adapters import tokamax_upstream
from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.errors import Problem, ScopeError, VerifyError
from tilepolicy.resolution import SettingValue
from tilepolicy.session import Lookup
from tilepolicy.settings import Layer, Pass

__all__ = ["ReadKernel", "Verification", "verify"]

type Tile = tuple[SettingValue, SettingValue, SettingValue]

_TILE: Final = ("tile_m", "tile_k", "tile_n")
_PASSES: Final[Mapping[tuple[int, int], Pass]] = {
    (1, 1): "fwd",
    (1, 2): "dlhs",
    (0, 0): "drhs",
}
_KERNELS: Final[Mapping[str, Kernel]] = {"v1": "tokamax_v1", "v2": "tokamax_v2"}


@dataclass(frozen=True, slots=True)
class ReadKernel:
    """One grouped-matmul kernel as a program carries it.

    Attributes:
        kernel: which kernel.
        pass_: the pass; None for a compiled v2 kernel that is fwd or dlhs: v2's dlhs is a forward
            product of a transposed matrix, and nothing in the program tells.
        sizes: (m, k, n) of the forward problem; of a v2 kernel without a pass, as called.
        tile: (tile_m, tile_k, tile_n) as the kernel's config names them.
        layer: the layer, if the op carries it and the program says so; else None.
    """

    kernel: Kernel
    pass_: Pass | None
    sizes: tuple[int, int, int]
    tile: Tile
    layer: Layer | None = None

    def __str__(self) -> str:
        m, k, n = self.sizes
        return f"{self.kernel} {self.pass_ or 'fwd|dlhs'} m={m} k={k} n={n} tile {self.tile}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`~tilepolicy.session.Session.verify` compared.

    Attributes:
        confirmed: kernels that carry a tile which was decided for their call.
        unseen: kernels that no lookup of the session explains.
        left: kernels whose call was left to the library (a miss).
        absent: decided lookups for which the program has no kernel.
    """

    confirmed: tuple[ReadKernel, ...]
    unseen: tuple[ReadKernel, ...]
    left: tuple[ReadKernel, ...]
    absent: tuple[Lookup, ...]


def verify(
    lookups: Iterable[Lookup],
    program: Any,  # noqa: ANN401 - jax.stages.Lowered or Compiled
    *,
    complete: bool,
) -> Verification:
    """Compare lookups with a program; see :meth:`tilepolicy.session.Session.verify`.

    Raises:
        VerifyError: a kernel carries another tile than was decided for its call.
        ScopeError: ``program`` is neither lowered nor compiled.
    """
    import jax

    if isinstance(program, jax.stages.Lowered):
        kernels = list(_lowered(program))
    elif isinstance(program, jax.stages.Compiled):
        kernels = list(_compiled(program))
    else:
        raise ScopeError(
            Problem(
                code="not-a-program",
                message=f"verify takes a lowered or compiled program, not {type(program).__name__}",
                remedy="pass jax.jit(f).lower(...) or its compile()",
            )
        )
    calls = _by_call([lookup for lookup in lookups if lookup.pass_ is not None])
    found: dict[str, list[ReadKernel]] = {name: [] for name in ("confirmed", "unseen", "left")}
    wrong: list[Problem] = []
    for kernel in kernels:
        verdict = _judge(kernel, calls.get((kernel.kernel, kernel.pass_, kernel.sizes), []))
        if isinstance(verdict, Problem):
            wrong.append(verdict)
        else:
            found[verdict].append(kernel)
    absent = _absent(calls, kernels)
    if complete:
        wrong += [_problem("unseen-kernel", f"{k} was not looked up here") for k in found["unseen"]]
        wrong += [_problem("no-kernel", f"the program has no kernel for {a.site}") for a in absent]
    if wrong:
        raise VerifyError(wrong)
    return Verification(
        tuple(found["confirmed"]), tuple(found["unseen"]), tuple(found["left"]), absent
    )


def _lowered(program: Any) -> Iterator[ReadKernel]:  # noqa: ANN401 - jax.stages.Lowered
    upstream = tokamax_upstream.load()
    for payload in upstream.op_payloads(program):
        op, arguments = payload["op"], payload["arguments"]
        kernel = upstream.payload_kernel(op)
        if kernel is None:
            continue
        pass_ = _pass(arguments["ragged_dot_dimension_numbers"])
        lhs, rhs = _shape(arguments["lhs"]), _shape(arguments["rhs"])
        groups = 1 if pass_ == "drhs" else rhs[0]
        shape = GmmShape.of_operands(pass_, lhs, rhs, groups)
        tile = _tile(op["config"].items())
        sizes = (shape.m, shape.k, shape.n)
        yield ReadKernel(kernel, pass_, sizes, tile, op.get("tilepolicy_layer"))


def _pass(dimension_numbers: Mapping[str, Any]) -> Pass:
    """The pass by its contracted dimensions, as the payload writes dimension numbers."""
    (lhs, rhs), _ = dimension_numbers["dot_dimension_numbers"]
    return _PASSES[lhs[0], rhs[0]]


def _shape(array: Any) -> tuple[int, ...]:  # noqa: ANN401 - JSON: text, or parts of one
    """Sizes of ``bf16[8,128]``; of a quantized array those of its values."""
    text = array if isinstance(array, str) else (array.get("qvalue") or array["value"])
    return tuple(int(size) for size in text[text.index("[") + 1 : text.index("]")].split(","))


def _compiled(program: Any) -> Iterator[ReadKernel]:  # noqa: ANN401 - jax.stages.Compiled
    from tilepolicy.tuning.readback import read_kernels

    for read in read_kernels(program.as_text()):
        kernel = _KERNELS.get(read.kernel)
        if kernel is None:
            continue
        shape, tile = read.shape, read.tile
        yield ReadKernel(kernel, read.pass_, (shape.m, shape.k, shape.n), (tile.m, tile.k, tile.n))


def _tile(config: Iterable[tuple[str, SettingValue]]) -> Tile:
    values = dict(config)
    return (values[_TILE[0]], values[_TILE[1]], values[_TILE[2]])


type _Call = tuple[Kernel, Pass | None, tuple[int, int, int]]


def _by_call(lookups: Iterable[Lookup]) -> dict[_Call, list[Lookup]]:
    """Lookups by what a kernel shows of its call; a v2 call also by what compiling leaves."""
    calls: dict[_Call, list[Lookup]] = defaultdict(list)
    for lookup in lookups:
        facts = dict(lookup.facts)
        kernel: Kernel = "tokamax_v1" if facts["backend"] == "tokamax_v1" else "tokamax_v2"
        m, embed, mlp = (int(str(facts[n])) for n in ("batch_seq", "embed_dim", "mlp_dim"))
        k, n = (embed, mlp) if facts["layer"] == "wi" else (mlp, embed)
        calls[kernel, lookup.pass_, (m, k, n)].append(lookup)
        if kernel == "tokamax_v2" and lookup.pass_ == "fwd":
            calls[kernel, None, (m, k, n)].append(lookup)
        if kernel == "tokamax_v2" and lookup.pass_ == "dlhs":
            calls[kernel, None, (m, n, k)].append(lookup)
    return calls


def _judge(kernel: ReadKernel, lookups: list[Lookup]) -> str | Problem:
    if kernel.layer is not None:
        lookups = [lookup for lookup in lookups if lookup.layer in (None, kernel.layer)]
    decided = {_tile(lookup.config): lookup.site for lookup in lookups if lookup.config}
    if kernel.tile in decided:
        return "confirmed"
    if any(lookup.miss for lookup in lookups):
        return "left"
    if not lookups:
        return "unseen"
    wanted = "; ".join(f"{site}: {tile}" for tile, site in decided.items())
    return _problem("other-tile", f"the program has {kernel}, decided was {wanted}")


def _absent(calls: Mapping[_Call, list[Lookup]], kernels: list[ReadKernel]) -> tuple[Lookup, ...]:
    carried = {(k.kernel, k.pass_, k.sizes, k.tile) for k in kernels}
    present = {
        lookup
        for (kernel, pass_, sizes), lookups in calls.items()
        for lookup in lookups
        if lookup.config and (kernel, pass_, sizes, _tile(lookup.config)) in carried
    }
    decided = dict.fromkeys(x for lookups in calls.values() for x in lookups if x.config)
    return tuple(lookup for lookup in decided if lookup not in present)


def _problem(code: str, message: str) -> Problem:
    return Problem(code=code, message=message, remedy="trace and compile inside the scope")
