"""Is there one order in which these overlapping operations could have happened? (Wing, Gong and Lowe.)

A history holds the operations of all clients: input, caller, times of call and return, and output. It is linearizable
if every operation can be given one moment between its call and its return so that a plain sequential `Model`, run in
the order of these moments, gives the same answers. Pure: no clock, no chance.

Consequences of the promise, and of Lowe's and porcupine's work on checking it:

- Call and return are closed intervals: one that returns at 3.0 and one that is called at 3.0 overlap. Clocks
  are coarse, and an equal reading must not convict.
- An operation without an answer may have taken effect at any time after its call, or never. One that certainly
  did *not* take effect (`maybe_applied=False`) does not belong in the history at all.
- If operations touch one key only, each key's history is checked by itself. The search is exponential in the number
  of operations that overlap, and this makes it feasible.
- A configuration is a set of finished operations and the state that they left. The order in which they finished does
  not matter, so the search visits each configuration once.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

CONFIGURATIONS_MAX = 1_000_000  # some seconds, and some hundred MB: a test's history should be smaller by far


class Unanswered(enum.Enum):
    """The output of an operation whose answer never came."""

    UNANSWERED = "unanswered"


UNANSWERED = Unanswered.UNANSWERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call as its client saw it; times are seconds on one clock shared by all clients.

    Attributes:
        returned: When the answer came; None if it never did.
    """

    client: str
    call: float
    returned: float | None = None
    input: Any
    output: Any = UNANSWERED

    def __post_init__(self) -> None:
        assert self.returned is None or self.returned >= self.call, f"returned before it was called: {self}"
        assert (self.returned is None) == (self.output is UNANSWERED), f"half an answer: {self}"


class Model(Protocol):
    """A sequential specification of the operations. States must be hashable."""

    def initial(self) -> Hashable:
        """The state before the first operation."""
        ...

    def step(self, state: Any, input: Any, output: Any) -> Sequence[Hashable]:
        """Return the states that `input` may leave behind if it answered `output`; none if it could not have.

        For `UNANSWERED`, return the states that it may leave behind with any answer.
        """
        ...

    def partition_key(self, input: Any) -> Hashable:
        """Operations with different keys never affect each other; the same for all, if that cannot be said."""
        ...


class UndecidedError(Exception):
    """The search was given up: too many operations overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the search.

    Attributes:
        order: If linearizable, an order that explains each key's history, key after key. If not, the longest
            explanation of the first key that has none.
        unexplained: The operations one of which should have come next, but none could.
        state: The state after `order`, if it was not linearizable.
    """

    linearizable: bool
    order: tuple[Operation, ...] = ()
    unexplained: tuple[Operation, ...] = ()
    state: Hashable = None

    def __str__(self) -> str:
        if self.linearizable:
            return "linearizable"
        return "\n".join(
            [
                "not linearizable; the longest explanation is",
                *(f"  {_line(operation)}" for operation in self.order),
                f"which leaves {self.state!r}, and then none of these could have come next:",
                *(f"  {_line(operation)}" for operation in self.unexplained),
            ]
        )


def assert_linearizable(
    history: Iterable[Operation], model: Model, *, configurations_max: int = CONFIGURATIONS_MAX
) -> None:
    """Fail, with the longest explanation there is, if the history has none."""
    verdict = check(history, model, configurations_max=configurations_max)
    assert verdict.linearizable, str(verdict)


def check(history: Iterable[Operation], model: Model, *, configurations_max: int = CONFIGURATIONS_MAX) -> Verdict:
    """Search for an order that explains the history.

    Raises:
        UndecidedError: One key's history took more than `configurations_max` configurations.
    """
    by_key: dict[Hashable, list[Operation]] = defaultdict(list)
    for operation in history:
        by_key[model.partition_key(operation.input)].append(operation)
    order: list[Operation] = []
    for operations in by_key.values():
        verdict = _Search(operations, model, configurations_max).run()
        if not verdict.linearizable:
            return verdict
        order += verdict.order
    return Verdict(linearizable=True, order=tuple(order))


@dataclass(frozen=True, slots=True)
class _Configuration:
    """The operations that are done, as a set of bits, and the state that they left; equal ones are one."""

    done: int
    state: Hashable
    # How the search got here does not tell configurations apart.
    last: int | None = field(default=None, compare=False)
    before: _Configuration | None = field(default=None, compare=False)

    def path(self) -> list[int]:
        """The operations done, in order."""
        path = []
        at: _Configuration | None = self
        while at is not None and at.last is not None:
            path.append(at.last)
            at = at.before
        return path[::-1]


class _Search:
    """A depth-first search through the configurations of one key's history."""

    def __init__(self, operations: list[Operation], model: Model, configurations_max: int) -> None:
        by_call = sorted(operations, key=lambda operation: operation.call)
        answered = [operation for operation in by_call if operation.returned is not None]
        unanswered = [operation for operation in by_call if operation.returned is None]
        # Answered ones come first, and so have the low bits: the search is over when those are all set.
        self._operations = answered + unanswered
        self._answered_count = len(answered)
        self._all_answered = (1 << len(answered)) - 1
        self._model = model
        self._configurations_max = configurations_max

    def run(self) -> Verdict:
        start = _Configuration(0, self._model.initial())
        if self._is_complete(start):
            return Verdict(linearizable=True)
        seen = {start}
        furthest = start
        paths = [self._next(start)]
        while paths:
            configuration = next(paths[-1], None)
            if configuration is None:
                paths.pop()
                continue
            if configuration in seen:
                continue
            if self._is_complete(configuration):
                return Verdict(linearizable=True, order=self._order(configuration))
            seen.add(configuration)
            if len(seen) > self._configurations_max:
                raise UndecidedError(f"undecided after {len(seen)} configurations; use more keys or fewer clients")
            furthest = max(furthest, configuration, key=self._answered_in)
            paths.append(self._next(configuration))
        return Verdict(
            linearizable=False,
            order=self._order(furthest),
            unexplained=tuple(self._operations[index] for index in self._candidates(furthest.done)),
            state=furthest.state,
        )

    def _next(self, configuration: _Configuration) -> Iterator[_Configuration]:
        for index in self._candidates(configuration.done):
            operation = self._operations[index]
            for state in self._model.step(configuration.state, operation.input, operation.output):
                if index >= self._answered_count and state == configuration.state:
                    continue  # an unanswered operation without effect is as good as one that never was
                yield _Configuration(configuration.done | 1 << index, state, index, configuration)

    def _candidates(self, done: int) -> Iterator[int]:
        """The operations that may come next: those called before any that is not done had returned."""
        first_return = math.inf
        lowest = (~done & (done + 1)).bit_length() - 1
        for index in range(lowest, self._answered_count):
            if done >> index & 1:
                continue
            operation = self._operations[index]
            # Sorted by call: all later ones were called later still, and none of them returned before this.
            if operation.call > first_return:
                break
            assert operation.returned is not None
            first_return = min(first_return, operation.returned)
            yield index
        # Of unanswered operations that are alike only the earliest: it may do all that the others may.
        alike: list[Any] = []
        for index in range(self._answered_count, len(self._operations)):
            operation = self._operations[index]
            if operation.call > first_return:
                break
            if not done >> index & 1 and operation.input not in alike:
                alike.append(operation.input)
                yield index

    def _is_complete(self, configuration: _Configuration) -> bool:
        return configuration.done & self._all_answered == self._all_answered

    def _answered_in(self, configuration: _Configuration) -> int:
        return (configuration.done & self._all_answered).bit_count()

    def _order(self, configuration: _Configuration) -> tuple[Operation, ...]:
        return tuple(self._operations[index] for index in configuration.path())


def _line(operation: Operation) -> str:
    returned = "..." if operation.returned is None else f"{operation.returned:g}"
    output = "no answer" if operation.output is UNANSWERED else repr(operation.output)
    return f"{operation.client} [{operation.call:g}, {returned}] {operation.input} -> {output}"


# A key-value store, each key by itself. A state is the key's value, or None if it does not exist.


@dataclass(frozen=True, slots=True)
class Get:
    """Read; answers the value, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class Put:
    """Write; the answer says nothing (a revision is not checked here), so any will do."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove; answers whether it was there."""

    key: str


class Presence(enum.Enum):
    """An expectation about a key that names no value."""

    MISSING = "missing"
    EXISTING = "existing"


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Write if the key is as expected; answers `Compared`."""

    key: str
    value: bytes
    expected: bytes | Presence

    def holds(self, state: bytes | None) -> bool:
        """Return True if the state meets the expectation."""
        match self.expected:
            case Presence.MISSING:
                return state is None
            case Presence.EXISTING:
                return state is not None
            case bytes():
                return state == self.expected
            case _:
                assert_never(self.expected)


@dataclass(frozen=True, slots=True)
class Compared:
    """The output of a `CompareAndSet`: whether it wrote, and the value afterwards."""

    succeeded: bool
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Add:
    """Add to a decimal number, counting from 0 if there is none; answers the sum."""

    key: str
    amount: int


RegisterInput = Get | Put | Delete | CompareAndSet | Add


class RegisterModel:
    """A key-value store as its clients are promised it."""

    def initial(self) -> bytes | None:
        """No key exists."""
        return None

    def partition_key(self, input: RegisterInput) -> str:
        """Keys are independent."""
        return input.key

    def step(self, state: bytes | None, input: RegisterInput, output: Any) -> list[bytes | None]:
        """Apply it. It is allowed if it had no answer, or exactly this one."""
        after = apply(state, input)
        if after is None:
            return []
        left, answer = after
        return [left] if output is UNANSWERED or isinstance(input, Put) or _same(output, answer) else []


def apply(state: bytes | None, input: RegisterInput) -> tuple[bytes | None, Any] | None:
    """Return the state that one operation leaves, and its answer; None for an error (adding to no number)."""
    match input:
        case Get():
            return state, state
        case Put():
            return input.value, None
        case Delete():
            return None, state is not None
        case CompareAndSet():
            succeeded = input.holds(state)
            left = input.value if succeeded else state
            return left, Compared(succeeded, left)
        case Add():
            try:
                total = int(state or b"0") + input.amount
            except ValueError:
                return None
            return b"%d" % total, total
        case _:
            assert_never(input)


def _same(output: Any, answer: Any) -> bool:
    # True == 1 in Python, but a deletion that answers 1 is not one that answers True.
    return type(output) is type(answer) and bool(output == answer)


async def carry_out(client: Any, wanted: RegisterInput, timeout: float) -> object:
    """Make a request to a store, and return the answer in terms of the model."""
    match wanted:
        case Get(key=key):
            entry = await client.get(key, timeout=timeout)
            return None if entry is None else entry.value
        case Put(key=key, value=value):
            return await client.put(key, value, timeout=timeout)
        case Delete(key=key):
            return await client.delete(key, timeout=timeout)
        case Add(key=key, amount=amount):
            return await client.add(key, amount, timeout=timeout)
        case CompareAndSet(key=key, value=value, expected=Presence.MISSING):
            result = await client.compare_and_set(key, value, expected_revision=0, timeout=timeout)
        case CompareAndSet(key=key, value=value, expected=bytes() as expected):
            result = await client.compare_and_set(key, value, expected_value=expected, timeout=timeout)
        case _:
            raise NotImplementedError(wanted)
    return Compared(result.succeeded, None if result.entry is None else result.entry.value)
