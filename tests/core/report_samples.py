"""Resolutions and problems made by hand, for the tests of what is shown."""

from __future__ import annotations

from tilepolicy.errors import Place, Problem
from tilepolicy.resolution import (
    Honoured,
    Loser,
    Origin,
    PolicyIdentity,
    Resolution,
    ResolvedSetting,
    SettingValue,
)
from tilepolicy.settings import AXES, SETTINGS

READ = Honoured("maxtext", "MaxText hands the knob to its kernel.")
UNREAD = Honoured(None, "tokamax_v1 takes its tile from Tokamax, not from this knob.")
SCOPED = Honoured("apply", "only inside tilepolicy.apply or tilepolicy run.")

ARITHMETIC = (
    "logits 8192 tokens × 129280 × 4 B = 3.95 GiB > max_chunk_bytes 128 MiB; 32 is the smallest "
    "power of two dividing 8192 that fits: 256 tokens, 126.25 MiB a chunk"
)

CLASHING_RULES = Problem(
    code="shadowed-rule",
    message="rule 'second' can never win",
    place=Place("p.yml", 9, 5, "  - name: second"),
    remedy="move it before 'first' or remove it",
    path="gmm.rules[1]",
    severity="warning",
)
UNKNOWN_KEY = Problem(
    code="unknown-key",
    message="unknown key 'tiel'",
    place=Place("dir with space/p.yml", 7, 3, "  tiel: {embed_dim: 128}"),
    remedy="did you mean 'tile'?",
    path="gmm.rules[0]",
)
MISSING_LIBRARY = Problem("missing-library", "jax is not installed", remedy="pip install jax")
PROBLEMS = (CLASHING_RULES, UNKNOWN_KEY, MISSING_LIBRARY)


def _setting(value: SettingValue, origin: Origin, honoured: Honoured = READ) -> ResolvedSetting:
    return ResolvedSetting(value, honoured, origin)


def _site(layer: str, pass_: str, *settings: ResolvedSetting) -> dict[str, ResolvedSetting]:
    return {f"{layer}_tile_{pass_}_{axis}": one for axis, one in zip(AXES, settings, strict=True)}


def sample_resolution() -> Resolution:
    """One of each: every kind of origin, every reader, losers, extra kernel field, a warning."""
    lock = Origin("lock", "keep", "p.yml", 30, "needs the whole logits", ())
    default = Origin("default")
    short = Origin(
        "rule",
        "short rows",
        "p.yml",
        4,
        "measured",
        (Loser("default", 512, reason="a rule goes before MaxText's default"),),
    )
    explicit = Origin("config", "wi_tile_dlhs_batch_seq", "c.yml", 12)
    settings = {
        "num_vocab_tiling": _setting(
            32,
            Origin(
                "auto",
                "num_vocab_tiling",
                reason=ARITHMETIC,
                lost=(Loser("default", 1, reason="an automatic value goes before …"),),
            ),
        ),
        "vocab_tiling_ag_once": _setting(True, Origin("rule", "vocab_tiling_ag_once", "p.yml", 2)),
        **_site("wi", "fwd", *(_setting(128, short) for _ in AXES)),
        **_site(
            "wi",
            "dlhs",
            _setting(256, explicit),
            _setting(1024, default, UNREAD),
            _setting(1024, default, UNREAD),
        ),
        "wi_tile_fwd_input_buffer_count": _setting(2, short, SCOPED),
        "shard_optimizer_over_data": _setting(False, lock),
        "loss": _setting("chunked", Origin("rule", "loss", "p.yml", 3), SCOPED),
    }
    table = [*SETTINGS, *(name for name in settings if name not in SETTINGS)]
    return Resolution(
        policy=PolicyIdentity("sample", "0123456789abcdef" * 4, ("p.yml", "maxtext-default.yml")),
        device="v6e",
        backend="tokamax_v1",
        settings={name: settings[name] for name in table if name in settings},
        facts={
            "maxtext": "0.2.5",
            "tokens_per_device": 8192,
            "vocab_per_device": 129280,
            "wi.rows": 65500,
            "wi.batch_seq": 65536,
        },
        warnings=(CLASHING_RULES,),
    )
