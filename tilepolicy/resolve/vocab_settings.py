"""Proposals for the vocabulary settings: what the policy's ``vocab`` section comes to here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from tilepolicy.errors import Place, Problem
from tilepolicy.objectives import needs_whole_logits
from tilepolicy.precedence import Proposal
from tilepolicy.resolution import Origin
from tilepolicy.vocab import (
    BROKEN_TILED_LOSS,
    AgOnceChoice,
    Thresholds,
    TilingChoice,
    choose_loss,
    choose_tiling,
    tiled_loss_is_broken,
    weigh_ag_once,
    working_lengths,
)

if TYPE_CHECKING:
    from tilepolicy.facts import Facts
    from tilepolicy.model import VocabSettings

__all__ = ["VocabProposals"]

OWN_LOSSES: Final = ("sparse", "chunked", "online")
_TILING_FACTS: Final = ("tokens_per_device", "vocab_per_device", "logits_itemsize")


class VocabProposals(NamedTuple):
    """What the ``vocab`` section of a policy proposes under some facts.

    Attributes:
        vocab: the section.
        facts: facts of the config.
        places: where the policy sets ``vocab.KEY``; a key without a place was not set.
    """

    vocab: VocabSettings
    facts: Facts
    places: Mapping[str, Place]

    @property
    def thresholds(self) -> Thresholds:
        """The five numbers of the section that decide about tiling."""
        return Thresholds(
            max_chunk_bytes=self.vocab.max_chunk_bytes,
            max_monolithic_vocab_size=self.vocab.max_monolithic_vocab_size,
            max_monolithic_bytes=self.vocab.max_monolithic_bytes,
            min_chunk_tokens=self.vocab.min_chunk_tokens,
        )

    @property
    def broken(self) -> bool:
        """Whether the release's own tiled loss has wrong gradients and must stay off."""
        release = str(self.facts.values.get("maxtext", ""))
        allowed = self.vocab.allow_broken_upstream_loss
        return bool(release) and tiled_loss_is_broken(release) and not allowed

    def tiling(self) -> TilingChoice | None:
        """The number of chunks by the thresholds alone; None where a size is not known."""
        sizes = [self.facts.values.get(name) for name in _TILING_FACTS]
        if any(not isinstance(size, int) or size < 1 for size in sizes):
            return None
        tokens, vocab, itemsize = (int(size) for size in sizes if size is not None)
        choice = choose_tiling(tokens, vocab, itemsize, self.thresholds)
        rows = self.facts.values.get("logit_rows_per_device")
        if isinstance(rows, int) and rows > tokens:
            shared = f"{rows // tokens} devices share these tokens along tensor axes"
            return TilingChoice(choice.num_tiles, f"{choice.reason}; {shared}")
        return choice

    def propose_loss(self) -> Proposal:
        """The policy's loss; ``auto`` by the tiling, where tilepolicy's losses can run."""
        if self.vocab.loss != "auto":
            return Proposal(self.vocab.loss, self._from_policy("loss"))
        objection = self._own_loss_objection()
        if objection is not None:
            return Proposal("upstream", Origin("auto", "loss", reason=objection))
        tiling = self.tiling()
        if tiling is None:
            reason = f"{' and '.join(self._unknown())} not known: MaxText's own loss is kept"
            return Proposal("upstream", Origin("auto", "loss", reason=reason))
        loss = choose_loss(tiling)
        count = tiling.num_tiles
        reasons = {
            "sparse": "one chunk holds all logits: sparse",
            "chunked": f"{count} chunks: cut along the tokens",
            "online": "the tokens cannot be cut that small: cut along the vocabulary",
        }
        return Proposal(loss, Origin("auto", "loss", reason=reasons[loss]))

    def _own_loss_objection(self) -> str | None:
        """Why tilepolicy's losses do not fit this config: the scope replaces pre-training's."""
        if self.facts.values.get("use_dpo") is True:
            return "use_dpo computes its own loss, which tilepolicy does not replace"
        return None

    def propose_tiling(self, loss: str) -> Proposal | Problem:
        """``num_vocab_tiling`` of the policy; ``auto`` by the thresholds.

        Args:
            loss: the resolved loss.

        Returns:
            A problem where ``auto`` has no answer: a size is not known, or no number works.
        """
        if self.vocab.num_vocab_tiling != "auto":
            return Proposal(self.vocab.num_vocab_tiling, self._from_policy("num_vocab_tiling"))
        tiling = self.tiling()
        whole = needs_whole_logits(self.facts.values)
        if whole is not None:
            by_size = f" (by size: {tiling.reason})" if tiling is not None else ""
            return self._auto(1, whole + by_size)
        if tiling is None:
            return self._missing_sizes()
        if tiling.num_tiles is None:
            return self._no_tiling(tiling) if loss != "online" else self._auto(1, tiling.reason)
        if tiling.num_tiles > 1 and loss == "upstream" and self.broken:
            release = self.facts.values["maxtext"]
            return self._auto(
                1,
                f"MaxText {release}: {BROKEN_TILED_LOSS}, so auto leaves it off (it would be "
                f"{tiling.num_tiles}: {tiling.reason})",
            )
        return self._auto(tiling.num_tiles, tiling.reason)

    def broken_tiling(self, chosen: Mapping[str, Proposal], place: Place | None) -> list[Problem]:
        """A number of chunks that somebody chose although MaxText's own loss is wrong with it.

        Args:
            chosen: the resolved ``num_vocab_tiling`` and ``loss``.
            place: where the config sets the number, if it does.
        """
        value, origin = chosen["num_vocab_tiling"].value, chosen["num_vocab_tiling"].origin
        tiled = isinstance(value, int) and value > 1
        if not (tiled and self.broken and chosen["loss"].value == "upstream"):
            return []
        if origin.kind != "config":
            place = Place(origin.file, origin.line) if origin.file is not None else None
        return [
            Problem(
                "broken-upstream-loss",
                f"num_vocab_tiling {value} with MaxText {self.facts.values['maxtext']}: "
                f"{BROKEN_TILED_LOSS}",
                place,
                "install MaxText 0.2.5, or set vocab.loss to chunked and use `tilepolicy run`, or "
                "set vocab.allow_broken_upstream_loss to true",
                path="num_vocab_tiling",
            )
        ]

    def propose_ag_once(self, num_tiles: int) -> Proposal:
        """``vocab_tiling_ag_once`` of the policy; ``auto`` by gathers saved against bytes held."""
        name = "vocab_tiling_ag_once"
        if self.vocab.vocab_tiling_ag_once != "auto":
            return Proposal(self.vocab.vocab_tiling_ag_once, self._from_policy(name))
        choice = self._weigh(num_tiles)
        if choice is None:
            reason = "the sizes of the head or its shards are not known: tilepolicy's default"
            return Proposal(True, Origin("auto", name, reason=reason))
        return Proposal(choice.value, Origin("auto", name, reason=choice.reason))

    def _weigh(self, num_tiles: int) -> AgOnceChoice | None:
        facts = self.facts.values
        vocab, embed = (
            facts.get("vocab_per_device"),
            facts.get("emb_dim", facts.get("base_emb_dim")),
        )
        shards = [facts.get("fsdp_shards"), facts.get("expert_shards")]
        if not isinstance(vocab, int) or not isinstance(embed, int):
            return None
        if not all(isinstance(count, int) for count in shards):
            return None
        return weigh_ag_once(
            num_tiles=num_tiles,
            vocab=vocab,
            embed_dim=embed,
            head_itemsize=_itemsize(facts.get("dtype")),
            gradient_itemsize=_itemsize(facts.get("weight_dtype")),
            head_shards=int(shards[0] or 1) * int(shards[1] or 1),
            max_held_bytes=self.vocab.max_monolithic_bytes,
        )

    def _from_policy(self, key: str) -> Origin:
        """The origin of a value that the section has: its place, or tilepolicy's own default."""
        place = self.places.get(f"vocab.{key}")
        if place is None:
            return Origin("auto", key, reason="tilepolicy's default")
        return Origin("rule", key, file=place.file, line=place.line)

    @staticmethod
    def _auto(value: int, reason: str) -> Proposal:
        return Proposal(value, Origin("auto", "num_vocab_tiling", reason=reason))

    def _unknown(self) -> list[str]:
        return [name for name in _TILING_FACTS if name not in self.facts.values]

    def _missing_sizes(self) -> Problem:
        unknown = self._unknown()
        keys = dict.fromkeys(key for name in unknown for key in self.facts.missing.get(name, ()))
        verb = "is" if len(unknown) == 1 else "are"
        return Problem(
            "missing-fact",
            f"num_vocab_tiling: auto needs {' and '.join(unknown)}, which {verb} not known",
            remedy=f"set {' or '.join(keys)}, or num_vocab_tiling itself"
            if keys
            else "set num_vocab_tiling itself",
            path="num_vocab_tiling",
        )

    def _no_tiling(self, tiling: TilingChoice) -> Problem:
        facts = self.facts.values
        length, batch = facts.get("max_target_length"), facts.get("per_device_batch_size")
        remedy = "change max_target_length or per_device_batch_size, or set vocab.loss to online"
        if isinstance(length, int) and isinstance(batch, int | float):
            vocab, itemsize = int(facts["vocab_per_device"]), int(facts["logits_itemsize"])
            lengths = working_lengths(length, batch, vocab, itemsize, self.thresholds)
            if lengths:
                which = " or ".join(str(number) for number in lengths)
                remedy = f"max_target_length {which} would work; or set vocab.loss to online"
        return Problem(
            "no-tiling",
            f"num_vocab_tiling: auto finds no number of chunks: {tiling.reason}",
            remedy=remedy,
            path="num_vocab_tiling",
        )


def _itemsize(dtype: object) -> int:
    """Bytes of one entry; MaxText computes in bfloat16 unless told otherwise."""
    return 4 if str(dtype) == "float32" else 2
