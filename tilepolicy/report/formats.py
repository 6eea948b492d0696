"""Machine-readable output: one function from data to text for each ``--format``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from tilepolicy.errors import Problem
from tilepolicy.report.problems import github, summary
from tilepolicy.report.table import value_text
from tilepolicy.resolution import Resolution, ResolvedSetting
from tilepolicy.resolve.readers import PADDING_KNOBS
from tilepolicy.settings import SETTINGS

__all__ = [
    "ProblemFormat",
    "ResolutionFormat",
    "maxtext_lines",
    "render_problems",
    "render_resolution",
]

ResolutionFormat = Literal["json", "yaml", "maxtext"]
ProblemFormat = Literal["text", "json", "sarif", "github"]


def render_resolution(resolution: Resolution, form: ResolutionFormat) -> str:
    """A resolution as text that ends in a newline."""
    if form == "maxtext":
        return "".join(f"{line}\n" for line in maxtext_lines(resolution))
    from tilepolicy.report.jsonform import resolution_json

    document = resolution_json(resolution)
    if form == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def maxtext_lines(resolution: Resolution) -> list[str]:
    """``key=value`` for every setting that MaxText itself honours with this config.

    A knob that the selected backend ignores is left out: on the command line it would look as if
    it worked. The knob that pads rows is there also where its tile takes effect by ``apply``.
    """
    return [
        f"{name}={value_text(setting.value)}"
        for name, setting in resolution.settings.items()
        if name in SETTINGS
        and SETTINGS[name].since is not None
        and (setting.honoured.by == "maxtext" or _pads(name, setting))
    ]


def _pads(name: str, setting: ResolvedSetting) -> bool:
    return name in PADDING_KNOBS and setting.honoured.by == "apply"


def render_problems(problems: Sequence[Problem], form: ProblemFormat) -> str:
    """Problems as text; empty for no problem in ``text`` and ``github``."""
    if form == "json":
        from tilepolicy.report.jsonform import problems_json

        return json.dumps(problems_json(problems), indent=2, ensure_ascii=False) + "\n"
    if form == "sarif":
        from tilepolicy.report.sarif import sarif

        return json.dumps(sarif(problems), indent=2, ensure_ascii=False) + "\n"
    if form == "github":
        return "".join(f"{github(problem)}\n" for problem in problems)
    return "".join(f"{problem}\n" for problem in problems) + (
        f"{summary(problems)}\n" if problems else ""
    )
