"""Feed generated policies and configs to the readers: no traceback, no hang, each error placed.

    python scripts/fuzz.py --inputs 20000 --seed 1

Inputs are mutations of the example and shipped policies and of config files, generated documents,
deep nestings, alias bombs and random bytes. Prints the counts and the slowest input; exit 1 on a
finding, with the input in a Python literal.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tilepolicy import configs, policy, source
from tilepolicy.errors import Problem, TilepolicyError

ROOT = Path(__file__).parent.parent
MAX_SECONDS = 1.0
CONFIG_EVERY = 3
"""One input in so many is read as a config too, which takes ten times as long as a policy."""

TOKENS = (
    "0512", "1_024", "12:30", "on", "off", "1e3", "0x10", ".5", "1.", ".inf", "~", "null", "true",
    "-1", "0", "1", "512", "7168", "1e400", '">=4096"', '">="', '"<1"', '"%0"', '"1..2"', '".."',
    "*", "[", "]", "{", "}", ": ", "- ", "? ", "| ", "> ", "'", '"', "&a ", "*a", "<<",
    "!!str ",
    "!!python/name:os.system ", "!x ", "# ", "---", "...", "%YAML", "\t", "\n", "\r", "\x00",
    "\x85",
    "\ufeff", "\u2028", "é", "😀", "layer", "wi", "pass", "device", "batch_seq", "when", "tile",
    "table", "rules", "gmm", "vocab", "locks", "ops", "extends", "[maxtext-default]", "[../x.yml]",
    "name", "version", "num_vocab_tiling", "128MiB", "base_config", "model_name", "${x}", "${",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 512, 10**30, 0.5, -2.5, 1e300, float("inf"), float("nan"), "", " ",
    "x", "wi", "v6e", "fwd", ">=4096", "<1", "1..2", "%0", "%128", ">=1,<0", "a*", "[", "128MiB",
    "1e3", "on", "é\n", "x" * 300, [], {}, [[]], ["wi", "fwd"], [1, ">=2"], {"a": 1}, "auto",
    "../x.yml", "x" * 5000 + ".yml", "a\0b.yml", "\0/base.yml", "s3://x/y.yml",
    "${a.b}", "deepseek3-671b", "none", "bfloat16", "tokamax_v1",
)  # fmt: skip


@dataclass
class Findings:
    """What came of the inputs.

    Attributes:
        outcomes: how many inputs had which first problem, or none.
        failures: inputs that broke a promise, with the promise.
        slowest: seconds of the slowest input, and the input.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, bytes]] = field(default_factory=list)
    slowest: tuple[float, bytes] = (0.0, b"")


def seeds() -> list[bytes]:
    """The files that are mutated: policies and configs."""
    folders = ("tests/examples/valid", "tests/examples/invalid", "policies", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.yml"))]
    return [path.read_bytes()[:20_000] for path in files]


def replaced(rng: random.Random, text: bytes) -> bytes:
    """A file whose YAML is well-formed, with values, keys and items changed."""
    value = source.parse(text, "seed.yml", "maxtext").value
    if not isinstance(value, dict):
        return mutated(rng, text)
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder: Any = value
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and rng.random() < 0.85:
                holder = inner
                continue
            match rng.randrange(4):
                case 0 if isinstance(holder, dict):
                    holder[rng.choice(TOKENS).strip() or "x"] = holder.pop(key)
                case 1:
                    del holder[key]
                case _:
                    holder[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return yaml.safe_dump(value, allow_unicode=True, sort_keys=False).encode()


def mutated(rng: random.Random, text: bytes) -> bytes:
    """A few edits of a file: tokens in, lines out, moved or doubled, bytes changed."""
    parts = bytearray(text)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(parts) + 1)
        end = min(len(parts), at + rng.randint(0, 12))
        match rng.randrange(6):
            case 0:
                parts[at:at] = rng.choice(TOKENS).encode()
            case 1:
                parts[at:end] = rng.choice(TOKENS).encode()
            case 2:
                del parts[at:end]
            case 3 if parts:
                parts[at % len(parts)] = rng.randrange(128)
            case 4:
                parts[at:at] = parts[rng.randrange(len(parts) + 1) :][: rng.randint(1, 80)]
            case _:
                lines = bytes(parts).split(b"\n")
                line = lines[rng.randrange(len(lines))]
                lines.insert(rng.randrange(len(lines) + 1), line)
                parts = bytearray(b"\n".join(lines))
    return bytes(parts)


def tokens(rng: random.Random, text: bytes) -> bytes:  # noqa: ARG001  # one signature
    """A soup of tokens that mean something to YAML or to a policy."""
    joined = "".join(
        rng.choice(TOKENS) + rng.choice(["", " ", "\n", ": ", ", "]) for _ in range(40)
    )
    return joined.encode()


def noise(rng: random.Random, text: bytes) -> bytes:  # noqa: ARG001  # one signature
    """Random bytes."""
    return rng.randbytes(rng.randint(0, 400))


def nested(rng: random.Random, text: bytes) -> bytes:  # noqa: ARG001  # one signature
    """Deep nesting of one kind, a ladder of aliases, or an alias bomb."""
    depth = rng.choice([3, 60, 64, 65, 500, 20_000])
    shape = rng.randrange(5)
    if shape == 0:
        return b"[" * depth + b"]" * rng.choice([0, depth])
    if shape == 1:
        return b"{a: " * depth + b"1" + b"}" * rng.choice([0, depth])
    if shape == 2:
        return b"".join(b" " * i + b"a:\n" for i in range(min(depth, 300)))
    if shape == 3:
        return b"- " * depth + b"x"
    width = rng.randint(1, 12)
    lines = ["a0: &a0 [x]"]
    for i in range(1, rng.randint(2, 70)):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines).encode()


MAKERS: tuple[tuple[int, Callable[[random.Random, bytes], bytes]], ...] = (
    (40, replaced),
    (35, mutated),
    (10, tokens),
    (10, noise),
    (5, nested),
)


def inputs(count: int, seed: int) -> Iterator[bytes]:
    """The generated inputs; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311  # it makes test inputs, no secrets
    files = seeds()
    weights, makers = zip(*MAKERS, strict=True)
    for _ in range(count):
        maker = rng.choices(makers, weights)[0]
        yield maker(rng, rng.choice(files))


def read(text: bytes, folder: Path) -> list[Problem]:
    """Problems of an input, read as a policy and as a MaxText config."""
    found: list[Problem] = []
    path = folder / "fuzz.yml"
    path.write_bytes(text)
    readers: list[Callable[[], object]] = [lambda: policy.load(path)]
    if len(text) % CONFIG_EVERY == 0:
        readers.append(lambda: configs.read(path, env={}))
    for reader in readers:
        try:
            reader()
        except TilepolicyError as error:
            found += error.problems
    return found


def fuzz(count: int, seed: int) -> Findings:
    """Read the inputs and collect what breaks a promise."""
    with tempfile.TemporaryDirectory() as folder:
        return _fuzz(count, seed, Path(folder))


def _fuzz(count: int, seed: int, folder: Path) -> Findings:
    findings = Findings()
    for text in inputs(count, seed):
        start = time.process_time()  # other work on the machine is no hang
        try:
            problems = read(text, folder)
        except Exception as error:  # noqa: BLE001  # any exception is what is looked for
            findings.failures.append((f"raised {error!r}", text))
            continue
        seconds = time.process_time() - start
        findings.slowest = max(findings.slowest, (seconds, text))
        if seconds > MAX_SECONDS:
            findings.failures.append((f"took {seconds:.1f} s", text))
        findings.outcomes[problems[0].code if problems else "valid"] += 1
        for problem in problems:
            place = problem.place
            if place is None or place.line is None or place.column is None or not str(problem):
                findings.failures.append((f"no place: {problem}", text))
    return findings


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    findings = fuzz(arguments.inputs, arguments.seed)
    total = time.perf_counter() - start
    for outcome, count in findings.outcomes.most_common():
        print(f"{count:8d}  {outcome}")
    print(f"{arguments.inputs} inputs in {total:.0f} s, slowest {findings.slowest[0]:.3f} s")
    for promise, text in findings.failures[:10]:
        print(f"{promise}\n    {text[:2000]!r}")
    print(f"{len(findings.failures)} broken promises")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
