"""What is wrong with a command line, in kinds that differ in what can still be said about the run; rows of rules.

A rule is a row of a table (`Rule`, `WithoutEffect`): when it is broken, and the sentence about it, which names the
flag, its value and the remedy. Where a sentence needs more than values of flags, a function stands among the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slime.utils.errors import UsageError
from slime.utils.files.yaml_config import FileUnusable

if TYPE_CHECKING:
    from slime.config.args import Args

T = TypeVar("T")
Check = Callable[..., Iterable[str]]
"""A row of a table: takes args and, where rows ask for it, the attributes whose flags are given."""
S = TypeVar("S", bound=str)


class NoEffect(str):
    """The sentence that given flags change nothing in this run.

    Checks return it among the sentences of what is wrong. `Problems.settle` takes it out for a warning; with
    --strict-flags it stays an error.

    Attributes:
        flags: as on the command line, with their values where those matter.
        why: the rest of the statement, as "without --use-tis".
        instead: attribute -> value of a run without these flags, where code would read the given one.
    """

    flags: tuple[str, ...]
    why: str
    instead: Mapping[str, Any]

    def __new__(
        cls, flags: str | Iterable[str], why: str, remedy: str = "", *, instead: Mapping[str, Any] | None = None
    ) -> NoEffect:
        """Write the sentence; `remedy` is its end, as "leave it out"."""
        names = (flags,) if isinstance(flags, str) else tuple(flags)
        verb = "has" if len(names) == 1 else "have"
        sentence = super().__new__(
            cls, f"{', '.join(names)} {verb} no effect {why}" + (f"; {remedy}." if remedy else ".")
        )
        sentence.flags, sentence.why, sentence.instead = names, why, dict(instead or {})
        return sentence

    def about(self, what: str) -> NoEffect:
        """The same of a part of the run, which the flags are then named with."""
        flags = [f"{what}: {self.flags[0]}", *self.flags[1:]]
        return NoEffect(flags, self.why, instead=self.instead)


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules.

    Attributes:
        when: gives something true for args that break the rule.
        sentence: what is wrong; in a text, `{name}` stands for the value of `args.name`.
        given: attributes, separated by spaces, whose flags have to be on the command line, too.

    Example:
        >>> from slime.config.args import Args
        >>> rule = Rule(lambda args: args.eps_clip < 0, "--eps-clip {eps_clip} must be at least 0.")
        >>> list(rule(Args.of({"eps_clip": -1})))
        ['--eps-clip -1 must be at least 0.']
    """

    when: Callable[[Args], object]
    sentence: str | Callable[[Args], str]
    given: str = ""

    def __call__(self, args: Args, given: Collection[str] = ()) -> Iterator[str]:
        if set(self.given.split()) <= set(given) and self.when(args):
            yield filled(self.sentence, args)


@dataclass(frozen=True)
class WithoutEffect:
    """A row that makes a `NoEffect` of given flags; its other fields are those of that."""

    when: Callable[[Args], object]
    flags: str | Callable[[Args], str]
    why: str | Callable[[Args], str]
    remedy: str = ""
    instead: Mapping[str, Any] = field(default_factory=dict)
    given: str = ""

    def __call__(self, args: Args, given: Collection[str] = ()) -> Iterator[NoEffect]:
        if set(self.given.split()) <= set(given) and self.when(args):
            yield NoEffect(filled(self.flags, args), filled(self.why, args), self.remedy, instead=self.instead)


class Effect(NamedTuple):
    """A row of a table of flags that have an effect together with others only.

    Attributes:
        names: their attributes, separated by spaces.
        holds: whether they have one, from args.
        otherwise: the end of the sentence "<flag> has no effect ...".
        remedy: as in `NoEffect`.
    """

    names: str
    holds: Callable[[Args], object]
    otherwise: str
    remedy: str = "leave it out"


def check_effects(
    rows: Iterable[Effect],
    args: Args,
    asking: Collection[str],
    *,
    option_of: Callable[[str], str],
    defaults: Mapping[str, Any],
) -> Iterator[NoEffect]:
    """Say which flags have no effect.

    Args:
        rows: the table.
        args: the flags.
        asking: attributes whose flags are given and ask for something.
        option_of: the option of an attribute.
        defaults: attribute -> value of a run without its flag; another attribute keeps what is given.
    """
    for row in rows:
        names = [name for name in row.names.split() if name in asking]
        if names and not row.holds(args):
            instead = {name: defaults[name] for name in names if name in defaults}
            yield NoEffect(map(option_of, names), row.otherwise, row.remedy, instead=instead)


def filled(text: str | Callable[[Args], str], args: Args) -> str:
    """Return a text of a row with the values of args in it."""
    return text(args) if callable(text) else text.format_map(vars(args))


def each(names: str, when: Callable[[Any], object], sentence: str) -> tuple[Rule, ...]:
    """Return one rule for several flags.

    Args:
        names: their attributes, separated by spaces.
        when: as in `Rule`, of the value of one.
        sentence: `{option}` stands for the flag, `{value}` for its value.
    """

    def rule_of(name: str) -> Rule:
        text = sentence.replace("{option}", plain_option(name)).replace("{value", "{" + name)
        return Rule(lambda args: when(vars(args)[name]), text)

    return tuple(map(rule_of, names.split()))


def for_each(
    things: Callable[[Args], Iterable[Any]], when: Callable[[Args, Any], object], sentence: Callable[[Args, Any], str]
) -> Check:
    """Return a row that speaks of each of several things that breaks it.

    Args:
        things: gives them, from args.
        when, sentence: as in `Rule`, of args and one of them.
    """
    return lambda args, *given: (sentence(args, thing) for thing in things(args) if when(args, thing))


def where(when: Callable[[Args], object], *rows: Check) -> Check:
    """Return a row for several that hold only in some runs."""
    return lambda args, *given: broken(rows, args, *given) if when(args) else ()


def first_of(*rows: Check) -> Check:
    """Return a row that says what the first broken one of several says."""
    return lambda args, *given: islice(broken(rows, args, *given), 1)


def broken(rows: Iterable[Check], args: Args, *given: Collection[str]) -> Iterator[str]:
    """Yield the sentences of all rows, in order.

    Args:
        rows: of one or more tables.
        args: the flags.
        given: the attributes whose flags are on the command line, where a row asks for them.
    """
    for row in rows:
        yield from row(args, *given)


def plain_option(attribute: str) -> str:
    """Return the flag of an attribute that has a plain name."""
    return "--" + attribute.replace("_", "-")


@dataclass
class Problems:
    """Sentences about one command line; a run starts only when there are none.

    Attributes:
        wrong: it contradicts itself or cannot be read, so nothing can be planned.
        environment: what it points at is missing or unusable here: files, hooks, ports, devices.
        unsupported: it asks for something that is not built yet.
        no_effect: what is given and changes nothing: a warning, which refuses no run.
        notes: what works, but otherwise than a user may think: warnings, too.
        lacking: packages that a plan can do without and a run cannot.
    """

    wrong: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    no_effect: list[NoEffect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        """Every sentence that refuses the run, once, in the order of the kinds."""
        return list(dict.fromkeys([*self.wrong, *self.environment, *self.unsupported]))

    def extend(self, other: Problems) -> None:
        """Add the sentences of another."""
        for name, sentences in vars(other).items():
            vars(self)[name] += sentences

    def settle(self) -> dict[str, Any]:
        """Take what has no effect out of the errors; returns attribute -> value of a run without those flags."""
        for kind in (self.wrong, self.environment):
            self.no_effect += [sentence for sentence in kind if isinstance(sentence, NoEffect)]
            kind[:] = [sentence for sentence in kind if not isinstance(sentence, NoEffect)]
        self.no_effect[:] = dict.fromkeys(self.no_effect)
        return {name: value for sentence in self.no_effect for name, value in sentence.instead.items()}

    def replaced(self) -> set[str]:
        """Return the attributes whose values `settle` gives."""
        return {name for one in self.wrong if isinstance(one, NoEffect) for name in one.instead}

    def warning(self) -> str | None:
        """One sentence that names every flag without an effect."""
        if not self.no_effect:
            return None
        number = sum(len(sentence.flags) for sentence in self.no_effect)
        what = "1 flag has" if number == 1 else f"{number} flags have"
        named = "; ".join(f"{', '.join(sentence.flags)} {sentence.why}" for sentence in self.no_effect)
        return f"{what} no effect here (--strict-flags refuses them): {named}."

    def beside(self, other: Problems, what: str) -> Problems:
        """The sentences that the other has not, each behind `what` it is about."""

        def own(kind: list[str], known: list[str]) -> list[str]:
            return [
                sentence.about(what) if isinstance(sentence, NoEffect) else f"{what}: {sentence}"
                for sentence in kind
                if sentence not in known
            ]

        return Problems(
            own(self.wrong, other.wrong),
            own(self.environment, other.environment),
            own(self.unsupported, other.unsupported),
            [sentence.about(what) for sentence in self.no_effect if sentence not in other.no_effect],
        )


def read_file(problems: Problems, function: Callable[..., T], *args: Any) -> T | None:
    """Call a function that reads a file of settings; None where it cannot.

    A file that is not there says nothing about the command line, so that goes to `problems.environment`; what is
    wrong in it goes to `problems.wrong`.
    """
    try:
        return function(*args)
    except FileUnusable as error:
        problems.environment += error.messages
    except UsageError as error:
        problems.wrong += error.messages
    return None


def collected(kind: list[str], function: Callable[..., T], *args: Any, **keywords: Any) -> T | None:
    """Call a function; what its UsageError says goes to `kind`, one of a Problems' lists, and None is returned."""
    try:
        return function(*args, **keywords)
    except UsageError as error:
        kind += error.messages
        return None


def without_repeats(sentences: Iterable[S], earlier: Iterable[str]) -> list[S]:
    """Drop sentences about flags that an earlier sentence names: they are wrong only because those were not parsed."""

    def flags_in(sentence: str) -> set[str]:
        return {word.strip(":,.?") for word in sentence.split() if word.startswith("--")}

    named = {flag for sentence in earlier for flag in flags_in(sentence)}
    return [sentence for sentence in sentences if not named & flags_in(sentence)]
