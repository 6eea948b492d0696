"""A MaxText config read as files: every value with where it comes from.

MaxText's precedence, weakest first (its ``configs/pyconfig.py``, 0.2.0 to 0.2.5; measured by
``tests/core/test_maxtext_configs.py``): ``base.yml``, the config file's own chain of
``base_config``, the model's file ``models/NAME.yml``, ``KEY=VALUE`` arguments and keyword
arguments, environment variables ``M_KEY``. So the *model's file beats the user's config file*,
without a word, and ``override_model_config`` does not change that: it only lets arguments and
environment variables win against the model's file. :func:`read` warns wherever it happens.

Nothing of MaxText is imported or executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tilepolicy.configs.files import Locator, read_chain, read_model
from tilepolicy.configs.keys import COMPUTED, ReleaseKeys
from tilepolicy.configs.objects import is_config_object, object_values
from tilepolicy.configs.overrides import parse_arguments, parse_environment
from tilepolicy.configs.values import ConfigValue, ConfigValues, Draft, Entries
from tilepolicy.errors import Place, Problem

__all__ = ["Config", "read"]

type Config = str | os.PathLike[str] | Mapping[str, object] | object
"""A config file, a mapping taken as keyword arguments of MaxText, or a MaxText config object."""


def read(
    config: Config,
    overrides: Iterable[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    maxtext_configs: str | os.PathLike[str] | None = None,
    release: str | None = None,
) -> ConfigValues:
    """Read a MaxText config with every source that MaxText itself would take.

    Explicit are all values but those of MaxText's own ``base.yml``; a value of -1 or ``auto`` of a
    setting is not explicit. A user's own copy of ``base.yml`` (a file of that name elsewhere)
    counts only where it differs from MaxText's. A *mapping* stands for keyword arguments: it ranks
    with the command line and all of it is explicit; its ``base_config`` names the file below it.
    Of a *config object* (``HyperParameters`` or the pydantic model) a value is explicit if the
    object records it as set by argument, keyword or environment, or if it differs from MaxText's
    default: a config file's value that equals the default cannot be told from it.

    Args:
        config: path of a config file, mapping, or MaxText config object.
        overrides: ``KEY=VALUE`` arguments as MaxText's command line takes them.
        env: environment to look for ``M_KEY`` in; None for the process's. Pass ``{}`` for none.
        maxtext_configs: the ``configs`` folder of a MaxText checkout to use instead of the
            installed one; default the variable ``TILEPOLICY_MAXTEXT_CONFIGS``, if set.
        release: MaxText release whose keys and defaults hold; default that of the folder found.

    Raises:
        ConfigError: with every problem of all sources.
    """
    environment = os.environ if env is None else env
    folder = maxtext_configs or environment.get("TILEPOLICY_MAXTEXT_CONFIGS")
    locator = Locator.find(folder, release)
    if is_config_object(config):
        return object_values(config, locator)
    draft = Draft(locator.keys)
    arguments = parse_arguments(overrides, draft.problems)
    if isinstance(config, Mapping):
        arguments |= _keyword_arguments(config)
        config = str(config.get("base_config") or "base.yml")
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"a config is a path, a mapping or a MaxText config, not {type(config)}")
    path = locator.resolve_argument(os.fspath(config))
    chain = read_chain(path, locator, draft)
    _lay_defaults(draft, locator.keys, with_base=chain.builds_on_base)
    for layer in chain.layers:
        draft.lay(layer)
    _lay_model(draft, path, arguments, locator)
    draft.lay(arguments)
    draft.lay(parse_environment(environment, draft, arguments))
    return draft.finish(tuple(chain.files), locator.folder)


def _keyword_arguments(config: Mapping[str, object]) -> Entries:
    return {
        str(key): ConfigValue(value, "mapping", Place("<mapping>"))
        for key, value in config.items()
        if key != "base_config"
    }


def _lay_defaults(draft: Draft, keys: ReleaseKeys, *, with_base: bool) -> None:
    """The defaults of ``base.yml`` or, for a config that does not build on it, of the model.

    Without ``base.yml`` MaxText has no logical axis rules but the config's own.
    """
    values = dict(keys.base) if with_base else dict(keys.base) | dict(keys.fields)
    if with_base:
        values = dict(keys.fields) | values
    else:
        values["logical_axis_rules"] = []
    draft.lay(
        {key: ConfigValue(value, "default") for key, value in values.items() if value != COMPUTED}
    )


def _lay_model(draft: Draft, config: Path, arguments: Entries, locator: Locator) -> None:
    """The model's own file, with what MaxText says and does not say about contradictions."""
    chosen = arguments.get("model_name") or draft.entries.get("model_name")
    name = str(chosen.value) if chosen is not None else "default"
    if name == "default":
        return
    model = read_model(name, config, locator, draft)
    if model is None:
        draft.problems.append(_no_model_file(name, chosen, locator))
        return
    may_override = bool((arguments.get("override_model_config") or _FALSE).value) or bool(
        (draft.entries.get("override_model_config") or _FALSE).value
    )
    for key, ours in model.items():
        argument = arguments.get(key)
        if argument is not None and argument.value != ours.value and not may_override:
            draft.problems.append(_contradiction(key, argument, ours, name))
        below = draft.entries.get(key)
        loses = below is not None and below.source == "file" and below.value != ours.value
        if argument is None and below is not None and loses:
            draft.problems.append(_silent_loss(key, below, ours, name))
    draft.lay({key: ours for key, ours in model.items() if not (may_override and key in arguments)})


_FALSE = ConfigValue(False, "default")


def _no_model_file(name: str, chosen: ConfigValue | None, locator: Locator) -> Problem:
    place = chosen.place if chosen is not None else None
    if locator.folder is None:
        return Problem(
            "no-model-file",
            f"the sizes of model {name!r} are in MaxText's models/{name}.yml, and MaxText is not "
            "installed",
            place,
            "install MaxText, name a checkout's configs folder, or write the model's keys into "
            "the config",
            severity="warning",
        )
    return Problem(
        "no-model-file",
        f"MaxText {locator.keys.release} has no models/{name}.yml",
        place,
        locator.suggest_model(name),
        severity="warning",
    )


def _contradiction(key: str, argument: ConfigValue, ours: ConfigValue, name: str) -> Problem:
    return Problem(
        "contradicts-model",
        f"{key} is {argument.value!r} here and {ours.value!r} in {ours.place} of model {name!r}",
        argument.place,
        "MaxText refuses this; add override_model_config=True to let the argument win",
        path=key,
    )


def _silent_loss(key: str, below: ConfigValue, ours: ConfigValue, name: str) -> Problem:
    return Problem(
        "model-wins",
        f"{key}: {below.value!r} has no effect: MaxText lets the file of model {name!r} win "
        f"({ours.value!r} in {ours.place})",
        below.place,
        f"pass {key}={below.value} override_model_config=True on the command line",
        path=key,
        severity="warning",
    )
