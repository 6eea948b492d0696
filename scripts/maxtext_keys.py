"""Write ``tilepolicy/data/maxtext_keys.json``: the config keys of each MaxText release.

The table lets tilepolicy read a config that builds on ``base.yml`` where MaxText is not installed,
name unknown keys, and spare itself the parsing of a 1,500-line file whose values it knows.
It is read from the wheels as files: no MaxText code runs.

    pip download --no-deps -d WHEELS maxtext==0.2.5
    python scripts/maxtext_keys.py WHEELS/maxtext-*.whl

Form: one entry per release, each a difference to the one before.

``base_sha256``  digest of the release's ``configs/base.yml``.
``set``          key to its value in ``base.yml``, where new or changed.
``removed``      keys that ``base.yml`` no longer has.
``fields``       key of the pydantic model to its own default, where that differs from ``base.yml``
                 or ``base.yml`` lacks the key: what MaxText takes without ``base.yml``.
``fields_removed``  keys that ``fields`` no longer has.
``rl``           keys that only the configs of reinforcement learning have; whole.
``models``       names of the files under ``configs/models``; whole, not a difference.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

import yaml

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None

TARGET = Path(__file__).parents[1] / "tilepolicy" / "data" / "maxtext_keys.json"
RL_PARTS = (
    "RLCluster",
    "RLDataset",
    "RLEvaluation",
    "RLReward",
    "RLSpecialTokens",
)
"""Models nested in ``RLConfig``; their fields may stand at the top level of a config."""
UNKNOWN = "?"
"""Default of a field that is computed when the model is built, not written down."""


class _Loader(yaml.SafeLoader):
    """Reads ``1e-5`` as a number, as MaxText's loader does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _enums(tree: ast.Module) -> dict[str, Json]:
    """``Class.MEMBER`` to its value, for every enum of the module."""
    found: dict[str, Json] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
                    found |= {
                        f"{node.name}.{target.id}": line.value.value
                        for target in line.targets
                        if isinstance(target, ast.Name)
                    }
    return found


def _default(value: ast.expr | None, enums: dict[str, Json]) -> Json:
    """The default that a field declaration writes down, or UNKNOWN."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        value = value.args[0] if value.args else keywords.get("default")
        if value is None and isinstance(factory := keywords.get("default_factory"), ast.Lambda):
            value = factory.body
        elif value is None and getattr(factory, "id", "") == "list":
            return []
    if value is None:
        return UNKNOWN
    dotted = ast.unparse(value)
    if dotted in enums:
        return enums[dotted]
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNKNOWN


def model_fields(source: str, *roots: str) -> dict[str, Json]:
    """Fields of the named classes and their bases, read from the text of ``configs/types.py``."""
    tree = ast.parse(source)
    enums = _enums(tree)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields: dict[str, Json] = {}

    def visit(name: str) -> None:
        for base in classes[name].bases:
            if getattr(base, "id", None) in classes:
                visit(base.id)
        for line in classes[name].body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                fields[line.target.id] = _default(line.value, enums)

    for root in roots:
        if root in classes:
            visit(root)
    fields.pop("model_config", None)
    return fields


def _jsonable(value: object) -> Json:
    return json.loads(json.dumps(value, default=str))


def read_wheel(wheel: Path) -> dict[str, Json]:
    """The whole facts of one release."""
    with zipfile.ZipFile(wheel) as archive:
        base = archive.read("maxtext/configs/base.yml")
        types = archive.read("maxtext/configs/types.py").decode()
        prefix = "maxtext/configs/models/"
        models = sorted(
            name.removeprefix(prefix).removesuffix(".yml")
            for name in archive.namelist()
            if name.startswith(prefix) and name.endswith(".yml")
        )
    defaults = _jsonable(yaml.load(base, Loader=_Loader))  # noqa: S506 - a SafeLoader
    model = _jsonable(model_fields(types, "MaxTextConfig", "DPO", "LoRA"))
    rl = model_fields(types, "RLConfig", *RL_PARTS)
    fields = {
        key: default
        for key, default in model.items()
        if key not in defaults or (default != defaults[key] and default != UNKNOWN)
    }
    return {
        "base_sha256": hashlib.sha256(base).hexdigest(),
        "base": defaults,
        "fields": fields,
        "rl": sorted(set(rl) - set(model) - set(defaults)),
        "models": models,
    }


def _difference(new: dict[str, Json], old: dict[str, Json]) -> tuple[dict[str, Json], list[str]]:
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    return changed, sorted(set(old) - set(new))


def table(wheels: list[Path]) -> dict[str, Json]:
    """The content of the file for wheels in the order of their releases."""
    releases: dict[str, Json] = {}
    base: dict[str, Json] = {}
    fields: dict[str, Json] = {}
    for wheel in wheels:
        whole = read_wheel(wheel)
        changed, removed = _difference(whole["base"], base)
        changed_fields, removed_fields = _difference(whole["fields"], fields)
        base, fields = whole["base"], whole["fields"]
        releases[wheel.name.split("-")[1]] = {
            "base_sha256": whole["base_sha256"],
            "set": changed,
            "removed": removed,
            "fields": changed_fields,
            "fields_removed": removed_fields,
            "rl": whole["rl"],
            "models": whole["models"],
        }
    return {"releases": releases}


def main() -> None:
    """Write the table, or with ``--check`` exit 1 when it differs from the one in the tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    content = table(sorted(arguments.wheels, key=lambda wheel: wheel.name))
    text = json.dumps(content, indent=0, sort_keys=False, separators=(",", ":")) + "\n"
    if arguments.check:
        if TARGET.read_text(encoding="utf-8") != text:
            sys.exit(f"{TARGET} differs from what the wheels give")
        return
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {len(text)} bytes, releases {', '.join(content['releases'])}")


if __name__ == "__main__":
    main()
