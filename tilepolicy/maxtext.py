"""For programs that build their own loop on MaxText: its config under a policy.

::

    config = pyconfig.initialize(sys.argv)
    with tilepolicy.apply(policy, config=config) as session:
        config = tilepolicy.maxtext.resolved_config(config, policy)
        ...  # build the model and the step from this config
    print(session.report())

Give ``apply`` the config as it was read, so that origins in the report are the user's own.
``tilepolicy run`` does both for MaxText's own programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from tilepolicy import configs
from tilepolicy.configs.objects import is_config_object
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.resolution import SettingValue
from tilepolicy.resolve import resolver
from tilepolicy.run import handover
from tilepolicy.scope.inputs import load_policy

if TYPE_CHECKING:
    from tilepolicy.scope.inputs import PolicyLike

__all__ = ["resolved_config"]


class _Model(Protocol):
    """What is used of a pydantic model."""

    def model_copy(self, *, update: dict[str, SettingValue]) -> _Model: ...


def resolved_config[C](
    config: C, policy: PolicyLike, *, device: str | None = None, routes_loss: bool = True
) -> C:
    """A copy of a MaxText config with every setting that MaxText itself honours.

    Args:
        config: ``HyperParameters``, or the pydantic model behind it; left as it is.
        policy: a loaded policy, its path or shipped name, or several in the order tried.
        device: device name, where the config does not say it.
        routes_loss: whether the loop calls MaxText's pre-training ``loss_fn`` inside the scope;
            a loss of tilepolicy's then needs ``num_vocab_tiling`` > 1 (see
            :mod:`tilepolicy.run.handover`).

    Returns:
        A config of the same type.

    Raises:
        ConfigError: this is no MaxText config, or it contradicts the policy.
        PolicyError: the policy cannot be read.
    """
    if not is_config_object(config):
        raise ConfigError(
            Problem(
                code="no-maxtext-config",
                message=f"resolved_config takes a MaxText config object, not {type(config)!r}",
                remedy="pass what pyconfig.initialize returns; for files use tilepolicy run",
            )
        )
    values = configs.read(config)
    resolution = resolver(load_policy(policy), values, device=device).resolution()
    changes = dict(handover.plan(resolution, values, routes_loss=routes_loss).settings)
    model = getattr(config, "_pydantic_config", None)
    if model is None:
        return cast("C", cast("_Model", config).model_copy(update=changes))
    rebuild = cast("type", type(config))
    return cast("C", rebuild(cast("_Model", model).model_copy(update=changes)))
