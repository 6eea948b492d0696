"""``apply``: install a policy for one scope.  ``current``: the session of the innermost scope."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Literal

from tilepolicy.adapters import Adapter, ScopeRequest, select
from tilepolicy.context import active, strands
from tilepolicy.context.active import ActivePolicy
from tilepolicy.context.layers import MAXTEXT_CALL_SITES, CallSites, LayerSizes
from tilepolicy.errors import MissingLibraryError, Problem, ScopeError
from tilepolicy.scope.inputs import Inputs, PolicyLike, read_inputs
from tilepolicy.session import Session
from tilepolicy.settings import Phase

__all__ = ["Scope", "apply", "current"]


# Adapters import and inspect libraries when they are first entered: one thread at a time.
_ENTERING: Final = threading.RLock()


def current() -> Session | None:
    """The session of the innermost scope that is active here, or None.

    "Here" is this thread and, inside a coroutine, this task: scopes of others are not seen.
    """
    policies = active.policies()
    return policies[0].session if policies else None


def apply(
    policy: PolicyLike,
    *,
    config: object = None,
    overrides: Iterable[str] = (),
    device: str | None = None,
    phase: Phase = "train",
    strict: bool = False,
    sizes: LayerSizes | None = None,
    call_sites: Sequence[CallSites] = (),
    adapters: Iterable[str] | None = None,
    options: Mapping[str, Mapping[str, object]] | None = None,
) -> Scope:
    """Install a policy for one scope: a context manager that gives a session, and a decorator.

    ::

        with tilepolicy.apply("moe-v6e.yml", config="v3-671b.yml") as session:
            state, metrics = train_step(state, batch)
        print(session.report())

    What is traced inside uses the policy's tiles; policy and config are read here, adapters are
    entered by ``with``. Who sees a scope:

    - **nested scopes**: the inner policy wins, field by field; where it decides nothing, the outer
      one is asked. Entering the same content again changes nothing.
    - **jax**: the content digest is part of the trace key. Equal content (also of another policy
      object) finds the traced and compiled program again, other content traces anew, and outside
      the unscoped program is back. A program that was already compiled (``lower().compile()``) is
      outside of every scope: it keeps the tiles of the scope in which it was lowered. A backward
      pass is traced where it is called: ``jax.vjp`` inside, but its result called outside, gives
      a backward pass without the policy.
    - **threads**: a scope belongs to the thread that entered it; no other thread sees it, one
      started inside of it included.
    - **asyncio tasks**: a scope that a task entered is in force while that task runs, and only
      then: it is put aside whenever the task awaits and is suspended. Tasks that are started
      inside of it do not see it; enter the scope in them. A scope around ``asyncio.run`` is in
      force for all its tasks.
    - **copied contexts** (``contextvars.copy_context().run``): a context carries no policy. What
      it runs sees what is in force where it is run.
    - **processes**: a subprocess sees nothing, a forked one starts as a copy.
    - **generators**: a generator that yields inside its own ``with`` leaves the scope in force in
      its consumer until it is resumed or closed, in whatever order (``contextlib.contextmanager``
      is built on this). Close it in the thread that runs it. A *decorated* generator function is
      in the scope only while its own code runs.
    - **exceptions** leave the scope like any other exit. Nothing is left behind after exit: no
      overlay, no context value, no patched attribute.

    In a run of several jax processes, all of them compare policy, resolution and library versions
    before anything is compiled, and all stop with the same error if one differs.

    Args:
        policy: a loaded policy, its path or shipped name, or several in the order in which they
            are tried.
        config: MaxText config (path, mapping or config object). Without one, rules that need
            only what a call shows still match, and others are reported as undecidable.
        overrides: ``KEY=VALUE`` arguments on top of the config.
        device: device name, where the config does not say it.
        phase: ``train`` or ``eval``: what the traced step is for.
        strict: on a regular exit, fail if a rule was never hit though it applies here, a lookup
            found no rule, or a tile in use differs from the resolution.
        sizes: sizes of the layers on one shard; default those of the config.
        call_sites: functions whose calls tell the layer, tried before MaxText's.
        adapters: names of the adapters to enter; default all whose library is installed.
        options: adapter name to options for it.

    Raises:
        PolicyError: the policy cannot be read, or contradicts the config.
        ConfigError: the config is wrong.
        AdapterError: an adapter that is asked for does not exist.
        MissingLibraryError: jax, or the library of an adapter that is asked for, is not installed.
    """
    inputs = read_inputs(policy, config, overrides, device, phase=phase, sizes=sizes)
    return Scope(
        inputs,
        strict=strict,
        call_sites=(*call_sites, MAXTEXT_CALL_SITES),
        adapters=select(adapters),
        options=options or {},
    )


@dataclass(eq=False)
class _Activation:
    """One entry of a scope that has not been left yet."""

    payload: ActivePolicy
    cleanup: ExitStack


class Scope:
    """What :func:`apply` returns; can be entered again and again, also inside itself.

    Attributes:
        digest: content digest (hex SHA-256) that jax's trace key holds while it is in force.
        inputs: policy, config and facts that it stands for.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        strict: bool,
        call_sites: tuple[CallSites, ...],
        adapters: tuple[Adapter, ...],
        options: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.inputs = inputs
        self._strict = strict
        self._call_sites = call_sites
        self._adapters = adapters
        self._options = options
        self._lock = threading.Lock()
        self._open: list[_Activation] = []
        sites = [asdict(site) for site in call_sites]
        self.digest = _digest(inputs.content, sites, _plain(options))
        self._answers: dict[object, object] = {}
        self._versions: dict[str, str] = {}
        for adapter in adapters:
            self._versions |= adapter.versions()

    def __enter__(self) -> Session:
        session = Session(self.inputs, self._versions)
        self._enter(session)
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        activation = self._take()
        activation.cleanup.close()
        if error is None:
            self._finish(activation.payload.session)
        return False

    def _enter(self, session: Session) -> _Activation:
        distributed = _import_jax_parts()
        distributed.expect(self.digest, self.inputs.statement(self._versions))
        payload = ActivePolicy(
            digest=self.digest,
            resolver=self.inputs.resolver,
            session=session,
            phase=self.inputs.phase,
            sizes=self.inputs.sizes,
            call_sites=self._call_sites,
            ops=frozenset(self.inputs.policy.ops),
            fail_on_miss=self.inputs.fail_on_miss,
            answers=self._answers,
        )
        with ExitStack() as undo:
            for adapter in self._adapters:
                chosen = self._options.get(adapter.name, {})
                request = ScopeRequest(self.inputs.resolver, session, self.digest, chosen)
                with _ENTERING:
                    undo.enter_context(adapter.enter(request))
                session.entered(adapter.name)
            entry = strands.push(payload)
            undo.callback(strands.remove, entry)
            activation = _Activation(payload, undo.pop_all())
        with self._lock:
            self._open.append(activation)
        return activation

    def _finish(self, session: Session) -> None:
        if self._strict:
            session.check_strict()

    @contextmanager
    def _step(self, session: Session) -> Iterator[None]:
        """The scope for one step of a generator, with the generator's session."""
        activation = self._enter(session)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(activation)
            activation.cleanup.close()

    def __call__[**P, R](self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: each call runs in the scope, each with a session of its own.

        Coroutine functions stay coroutine functions. Of a generator function only its own code
        runs in the scope, not its consumer's.

        Raises:
            ScopeError: an asynchronous generator function; use ``with`` inside of it.
        """
        if inspect.isasyncgenfunction(function):
            raise ScopeError(
                Problem(
                    code="async-generator",
                    message=f"{function.__qualname__} is an asynchronous generator function",
                    remedy="enter the scope inside of it, around what is traced",
                )
            )
        wrapper: Any
        if inspect.iscoroutinefunction(function):
            wrapper = self._around_coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapper = self._around_generator(function)
        else:
            wrapper = self._around(function)
        return functools.update_wrapper(wrapper, function)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def scoped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the wrapped function's
            with self:
                return function(*args, **kwargs)

        return scoped

    def _around_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def scoped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the wrapped one's
            with self:
                return await function(*args, **kwargs)

        return scoped

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def scoped(
            *args: Any,  # noqa: ANN401 - the wrapped function's
            **kwargs: Any,  # noqa: ANN401 - the wrapped function's
        ) -> Generator[Any, Any, Any]:
            session = Session(self.inputs, self._versions)
            with self._step(session):
                inner = function(*args, **kwargs)
            step: Callable[[], Any] = functools.partial(next, inner)
            while True:
                try:
                    with self._step(session):
                        value = step()
                except StopIteration as stop:
                    self._finish(session)
                    return stop.value
                try:
                    sent = yield value
                except GeneratorExit:
                    with self._step(session):
                        inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on to the generator
                    step = functools.partial(inner.throw, error)
                else:
                    step = functools.partial(inner.send, sent)

        return scoped

    def _take(self) -> _Activation:
        """Forget an activation: the innermost that is in force here; else the last one."""
        here = {id(payload) for payload in strands.active()}
        with self._lock:
            if not self._open:
                raise ScopeError(
                    Problem(code="not-entered", message="this scope has not been entered")
                )
            in_force = (a for a in reversed(self._open) if id(a.payload) in here)
            activation = next(in_force, self._open[-1])
            self._open.remove(activation)
        return activation


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(options: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, str]]:
    """Options as text: they need not be JSON."""
    return {
        name: {key: repr(value) for key, value in chosen.items()}
        for name, chosen in options.items()
    }


def _import_jax_parts() -> Any:  # noqa: ANN401 - a module
    try:
        from tilepolicy.context import carrier, distributed
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise MissingLibraryError(
            Problem(
                code="missing-library",
                message="a scope needs jax, which is not installed",
                remedy='pip install "tilepolicy[tokamax]"',
            )
        ) from error
    del carrier  # Imported for its effect: from now on it follows what is in force.
    return distributed
