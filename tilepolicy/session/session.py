"""What a scope really did: every lookup with its origin, misses, and notes of other adapters."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from tilepolicy.errors import Problem, ScopeError
from tilepolicy.resolution import Origin, SettingValue
from tilepolicy.session.rules import RuleKey, never_hit
from tilepolicy.settings import Layer, Pass, Phase

if TYPE_CHECKING:
    from tilepolicy.adapters.tokamax_readback import Verification
    from tilepolicy.match.rules import Rule
    from tilepolicy.scope.inputs import Inputs

__all__ = ["Lookup", "Note", "Session"]

_LOG: Final = logging.getLogger("tilepolicy")


@dataclass(frozen=True, slots=True)
class Note:
    """A choice that was made outside of kernel lookups, for the report.

    Attributes:
        source: who made it: an adapter's name, or a part of tilepolicy such as ``losses``.
        subject: what was chosen: a setting's name, or a short name of the decision.
        value: what was chosen.
        reason: one sentence: why.
        origin: where the choice comes from, when a policy or config decided it.
    """

    source: str
    subject: str
    value: SettingValue
    reason: str = ""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """One distinct question of a kernel library and its answer.

    Attributes:
        adapter: who asked: ``tokamax``.
        op: snake-case class name of the op.
        device: normalised device name.
        facts: the facts that the call showed, as (name, value), sorted by name.
        layer: the layer; None for an op without layers, or where both layers have one tile (the
            facts are then those of wi).
        pass_: the pass of a grouped matmul.
        phase: what the step is for.
        evidence: how the layer was found; not part of what makes lookups equal.
        tile: what the policies decided, by policy name, as (field, value).
        origins: origin of each decided field, in the same order.
        config: what the library was given (its own field names); empty for a miss.
        miss: why nothing was answered and what is used instead; empty for a hit.
        undecidable: rules that may have matched but for facts that are not known here.
    """

    adapter: str
    op: str
    device: str
    facts: tuple[tuple[str, SettingValue], ...]
    layer: Layer | None = None
    pass_: Pass | None = None
    phase: Phase = "train"
    evidence: str = field(default="", compare=False)
    tile: tuple[tuple[str, SettingValue], ...] = ()
    origins: tuple[Origin, ...] = ()
    config: tuple[tuple[str, SettingValue], ...] = ()
    miss: str = ""
    undecidable: tuple[str, ...] = ()

    @property
    def site(self) -> str:
        """``wi.fwd`` for a grouped matmul, else the op's name."""
        if self.pass_ is None:
            return self.op
        return f"{self.layer or 'wi|wo'}.{self.pass_}"


class Session:
    """The record of one scope; filled by adapters, read by the report.

    Attributes:
        inputs: policy, config and facts of the scope; None for a session that belongs to none.
        versions: versions of the libraries that the adapters attach to.
    """

    def __init__(
        self, inputs: Inputs | None = None, versions: Mapping[str, str] | None = None
    ) -> None:
        self.inputs = inputs
        self.versions = dict(versions or {})
        self._lock = threading.Lock()
        # By identity, because an answer that is given again is the same object, and hashing one
        # costs more than the rest of a lookup. The list keeps the object, so its id stays its own.
        self._records: dict[int, list[Any]] = {}
        self._logged: set[Lookup] = set()
        self._notes: dict[Note, int] = {}
        self._adapters: dict[str, None] = {}
        self._hit: set[RuleKey] = set()

    def entered(self, adapter: str) -> None:
        """Record that an adapter was entered."""
        self._adapters[adapter] = None

    def record(self, lookup: Lookup) -> None:
        """Record a lookup; equal lookups are counted, and logged once."""
        with self._lock:
            known = self._records.get(id(lookup))
            if known is None:
                known = self._records[id(lookup)] = [lookup, 0]
            known[1] += 1
            is_first = known[1] == 1
        if is_first and _LOG.isEnabledFor(_level(lookup)):
            self._log(lookup)

    def _log(self, lookup: Lookup) -> None:
        """Log a lookup, unless an equal one was logged."""
        with self._lock:
            size = len(self._logged)
            self._logged.add(lookup)
            is_new = len(self._logged) > size
        if is_new:
            _log_lookup(lookup)

    def hit(self, rules: Iterable[RuleKey]) -> None:
        """Record that rules of this scope's policy decided something."""
        with self._lock:
            self._hit.update(rules)

    def note(self, note: Note) -> None:
        """Record a choice; equal notes are counted, and logged once."""
        with self._lock:
            count = self._notes.get(note, 0)
            self._notes[note] = count + 1
        if count == 0:
            _LOG.info("%s: %s = %s (%s)", note.source, note.subject, note.value, note.reason)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that were entered, in order."""
        return tuple(self._adapters)

    @property
    def lookups(self) -> Mapping[Lookup, int]:
        """Distinct lookups in the order of their first occurrence, with their counts."""
        counts: dict[Lookup, int] = {}
        with self._lock:
            for lookup, count in self._records.values():
                counts[lookup] = counts.get(lookup, 0) + count
        return counts

    @property
    def misses(self) -> Mapping[Lookup, int]:
        """The lookups that no rule decided, with their counts."""
        return {lookup: count for lookup, count in self.lookups.items() if lookup.miss}

    @property
    def notes(self) -> Mapping[Note, int]:
        """Distinct notes in the order of their first occurrence, with their counts."""
        with self._lock:
            return dict(self._notes)

    @property
    def rules_never_hit(self) -> tuple[Rule, ...]:
        """Rules for calls that decided nothing here, though no fact of the run rules them out."""
        if self.inputs is None:
            return ()
        lookups = self.lookups
        shown = [dict(lookup.facts) for lookup in lookups]
        places = [
            {name: value for name, value in facts.items() if name in ("backend", "device")}
            for facts in shown
        ]
        with self._lock:
            hit = set(self._hit)
        unique = {tuple(sorted(place.items())): place for place in places}
        return never_hit(
            self.inputs.policy,
            self.inputs.facts,
            [{n: v for n, v in p.items() if v is not None} for p in unique.values()],
            hit,
        )

    def report(self, form: Literal["text", "json"] = "text") -> str:
        """Every lookup with its origin and count, misses, notes, and rules never hit."""
        from tilepolicy.session import reporting as session_report

        return session_report.as_text(self) if form == "text" else session_report.as_json(self)

    def to_policy(self) -> str:
        """The operative policy as YAML: one rule for each call that a policy decided.

        Its replay gives every one of these calls the same tile, whatever else changes. Calls that
        were left to the library stay so.

        Raises:
            ScopeError: nothing was decided.
        """
        from tilepolicy.session import operative as session_policy

        if not any(lookup.config for lookup in self.lookups):
            raise ScopeError(
                Problem(
                    code="nothing-decided",
                    message="no lookup of this session was decided by a policy",
                    remedy="trace the step inside the scope first",
                )
            )
        return session_policy.operative_policy(self)

    def write_missed(self, path: str | os.PathLike[str]) -> None:
        """Write the grouped matmuls that no rule decided, for ``tilepolicy tune --missed``.

        Args:
            path: the file, replaced in one step; one without sites says that nothing missed.

        Raises:
            OSError: the file cannot be written.
        """
        from tilepolicy.session.misses import missed_sites
        from tilepolicy.tuning.missed import write_missed

        write_missed(path, missed_sites(self.misses))

    def verify(self, program: Any, *, complete: bool = False) -> Verification:  # noqa: ANN401
        """Compare what was decided with what a lowered or compiled program carries.

        Args:
            program: ``jax.stages.Lowered`` (Tokamax writes op and config into the module), or
                ``jax.stages.Compiled`` (the compiler writes each kernel's tile into the
                optimized HLO).
            complete: also fail for kernels that this session never saw (an explicit config, or
                another scope's program), and for decided lookups without a kernel.

        Returns:
            What was compared.

        Raises:
            VerifyError: a kernel carries another tile than was decided for its call.
        """
        from tilepolicy.adapters import tokamax_readback

        return tokamax_readback.verify(self.lookups, program, complete=complete)

    def check_strict(self) -> None:
        """Fail for what ``strict=True`` does not accept.

        Raises:
            StrictError: a lookup found no rule, a rule that applies here was never hit, or a tile
                in use differs from the resolution; all of them in one error.
        """
        from tilepolicy.session import checks as session_checks

        session_checks.check_strict(self)


def _level(lookup: Lookup) -> int:
    return logging.WARNING if lookup.miss else logging.INFO


def _log_lookup(lookup: Lookup) -> None:
    if lookup.miss:
        _LOG.warning("%s %s: %s", lookup.adapter, lookup.site, lookup.miss)
    else:
        tile = ", ".join(f"{name}={value}" for name, value in lookup.config)
        names = ", ".join(dict.fromkeys(o.name or o.kind for o in lookup.origins))
        _LOG.info("%s %s: %s from %s", lookup.adapter, lookup.site, tile, names)
