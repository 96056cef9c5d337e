"""Options: each is declared once, with its check, default and meaning (CFG-7).

``volume_size: int | None = option(int, None, "GiB of the disk")`` in a class declares
``volume-size``. ``schema`` and ``rows`` (for the reference) are generated from these declarations,
and ``load`` sets the attributes. An option that is a dictionary is declared with a table of
options, or with a subclass of ``Section`` as its check and ``convert``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.exceptions import ConfigError, PathItem

T = TypeVar("T")

log = logging.getLogger("nodepool.config")

#: Default of an option without which an object cannot be loaded.
REQUIRED = cast(Any, object())


class Derived(NamedTuple):
    """A default that depends on the object; ``find`` gets it and the name of the attribute."""

    text: str
    find: Callable[[Any, str], object]


def derived(text: str, find: Callable[[Any, str], object]) -> Any:
    return Derived(text, find)


def inherited(holder: str) -> Any:
    """Return a default: the same attribute of what the object has in attribute *holder*."""
    return Derived(f"the {holder}'s", lambda value, name: getattr(getattr(value, holder), name))


class Each(NamedTuple):
    """A check: a list of objects, whose class is in this attribute of the provider's class."""

    attribute: str


@dataclasses.dataclass(eq=False)
class Option:
    """A declared option; attributes of objects that are not loaded have the default."""

    #: As in voluptuous; dictionaries may contain options, and a class stands for the dictionary of
    #: its options.
    check: object
    default: object
    doc: str
    #: In the file; default: the name of the attribute.
    name: str = ""
    #: Marker of voluptuous. With v.Required, only validation requires the option, ``load`` uses the
    #: default.
    key: Callable[[str], object] = str
    convert: Callable[[Any], object] | None = None
    #: The default in the reference, if it is not the value's text.
    shown: str | None = None
    #: Whether ``load`` sets the attribute.
    stored: bool = True
    #: Loaded, but unknown to schema and reference.
    hidden: bool = False
    #: What part of the options, see ``load``, adds to the attribute; default: it replaces it.
    merge: Callable[[Any, Any], object] | None = None
    #: Whether the options of ``check`` are the object's own: the attribute has their values by
    #: name.
    flat: bool = False
    attribute: str = ""

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute
        self.name = self.name or attribute.replace("_", "-")

    def __get__(self, holder: object, owner: type) -> Any:
        return (
            self if holder is None else None if self.default is REQUIRED else self.value({}, holder)
        )

    def value(self, options: Mapping[str, Any], holder: object, name: str | None = None) -> Any:
        """Return the value for *holder*.

        :param name: of an option in a dictionary, which does not know it.
        :raises ConfigError: the option, or a required part of it, is missing.
        """
        name = name or self.name
        given = required(options, name) if self.default is REQUIRED else options.get(name)
        if self.flat:
            given = values(cast("dict[str, Any]", self.check), options)
        elif isinstance(self.default, dict | list):
            given = given or copy.copy(self.default)
        elif name not in options:
            given = (
                self.default.find(holder, self.attribute)
                if isinstance(self.default, Derived)
                else self.default
            )
        if (
            given is not None
            and (self.check is dict or _named(self.check))
            and not isinstance(given, dict)
        ):
            raise ConfigError(f"{name}: expected a dictionary", where=(name,))
        if isinstance(given, dict) or (given is not None and self.convert is None):
            self._require_parts(given, name)
        if self.convert is None and (self.check is not bool or self.default is None):
            return given
        with at((name,)):
            try:
                found = (self.convert or bool)(given)
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                text = (
                    f"expected a number, not {given!r}" if self.convert in (int, float) else error
                )
                raise ConfigError(f"{name}: {text}") from error
        if isinstance(found, dict) and not isinstance(given, dict):  # a short form
            self._require_parts(found, name)
        if isinstance(given, str) and type(found) in (int, float):
            log.warning("%s: %r is taken as the number %s; remove the quotes", name, given, found)
        return found

    def _require_parts(self, given: object, name: str) -> None:
        """Check that a dictionary has its required options."""
        if not isinstance(self.check, list):
            for path, part in rows(self.check):
                if part.default is REQUIRED and len(path) == 1:
                    required(given, path[0], (name,))


def option(check: object, default: T, doc: str, **more: Any) -> T:
    """Declare an option; the arguments are those of ``Option``, the type is that of the value."""
    return cast(T, Option(check, default, doc, **more))


def exclusive(group: str) -> Any:
    """Return a key for options of which at most one is given."""
    return functools.partial(v.Exclusive, group_of_exclusion=group)


def changed(declared: T, **changes: object) -> T:
    """Declare an option of a base class with other arguments."""
    return cast(T, dataclasses.replace(cast(Any, declared), **changes))


def whole(value: object) -> float:
    """Return an integer option; digits in quotes are accepted, with a warning of ``Option``."""
    try:
        return value if isinstance(value, int | float) else int(str(value))
    except ValueError:
        raise ValueError(f"expected a whole number, not {value!r}") from None


def a_list(value: object) -> list[Any]:
    """Return a list option."""
    if not isinstance(value, list):
        raise ValueError(f"expected a list, not {value!r}")
    return value


def entries(
    value: object, key: str, name: str = "name"
) -> Iterator[tuple[tuple[PathItem, ...], dict[str, Any]]]:
    """Return each dictionary of a list option with its position; an empty value has none.

    :param name: option that each of them requires.
    """
    if value and not isinstance(value, list):
        raise ConfigError(f"{key}: expected a list", where=(key,))
    for index, entry in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{key}: entry {index + 1} must be a dictionary of options", where=(key, index)
            )
        if not entry.get(name):
            raise ConfigError(f"required key '{name}' is missing in {key}", where=(key, index))
        if isinstance(entry[name], (dict, list, set)):
            raise ConfigError(f"{name}: expected str", where=(key, index, name))
        yield (key, index), entry


@contextmanager
def at(where: tuple[PathItem, ...], context: str | None = None) -> Iterator[None]:
    """Add the position of an option to errors of the block."""
    try:
        yield
    except ConfigError as error:
        error.where = (*where, *error.where)
        if context:
            error.context.append(context)
        raise


def required(options: object, key: str, where: tuple[PathItem, ...] = ()) -> Any:
    if not isinstance(options, dict) or options.get(key) is None:
        raise ConfigError(f"required key '{key}' is missing", where=where)
    return options[key]


def load(
    holder: object, options: Mapping[str, Any], cls: type | None = None, part: bool = False
) -> None:
    """Set the attributes of *holder*.

    :param cls: whose options are loaded; default: all of *holder*.
    :param part: change only the attributes of options that are given and not null.
    """
    for each in _declared(cls or type(holder)).values():
        if (
            each.stored
            and not isinstance(each.check, Each)
            and not (part and options.get(each.name) is None)
        ):
            value = each.value(options, holder)
            merged = (
                each.merge(getattr(holder, each.attribute), value) if part and each.merge else value
            )
            setattr(holder, each.attribute, merged)


class Section(ConfigValue):
    """A dictionary of options."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        load(self, options or {})


def values(table: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each option of a dictionary of options, by name."""
    return {name: each.value(options, None, name) for name, each in table.items()}


def _declared(cls: type) -> dict[str, Option]:
    """Return the declarations of a class and its bases by attribute."""
    return {
        each.attribute: each
        for base in reversed(cls.__mro__)
        for each in vars(base).values()
        if isinstance(each, Option)
    }


def _named(check: object) -> dict[Any, Any]:
    """Return the options of a dictionary, or of a class, by name."""
    if not isinstance(check, type):
        return check if isinstance(check, dict) else {}
    found: dict[Any, Any] = {}
    for each in _declared(check).values():
        found.update(_named(each.check) if each.flat else {each.name: each})
    return found


def _parts(check: object, owner: type | None) -> list[Any] | None:
    """Return the alternatives of a check, or the entries of a list."""
    if isinstance(check, Each):
        return [getattr(owner, check.attribute)]
    return (
        list(check.validators)
        if isinstance(check, v.All | v.Any)
        else check
        if isinstance(check, list)
        else None
    )


def schema(check: object, owner: type | None = None) -> Any:
    """Return the schema for voluptuous.

    :param owner: class of the provider, see ``Each``.
    """
    if (parts := _parts(check, owner)) is not None:
        found = [schema(part, owner) for part in parts]
        return type(check)(*found) if isinstance(check, v.All | v.Any) else found
    if not (named := _named(check)):
        return check
    keys: dict[Any, Any] = {}
    for name, each in named.items():
        if not isinstance(each, Option):
            keys[name] = schema(each, owner)
        elif not each.hidden:
            keys[v.Required(name) if each.default is REQUIRED else each.key(name)] = schema(
                each.check, owner
            )
    return (
        v.All(keys, *check.checks)
        if isinstance(check, type) and issubclass(check, ConfigValue) and check.checks
        else keys
    )


def rows(check: object, owner: type | None = None) -> Iterator[tuple[tuple[str, ...], Option]]:
    """Return every option with its path, for the reference; *owner* as in ``schema``."""
    for part in _parts(check, owner) or ():
        yield from rows(part, owner)
    for name, each in _named(check).items():
        if isinstance(each, Option) and not each.hidden:
            yield (name,), each
            yield from (((name, *path), inner) for path, inner in rows(each.check, owner))
