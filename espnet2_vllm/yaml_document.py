"""A yaml mapping that knows on which line each key stands, so that an error can say where to look."""

import difflib
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from espnet2_vllm.errors import ConfigError
from espnet2_vllm.safe_yaml import check_aliases

Path = tuple[str, ...]
MERGE_TAG = "tag:yaml.org,2002:merge"


class Document:
    """``data`` of a yaml file or of a mapping; ``source`` names it in messages."""

    def __init__(self, source: str, data: dict[str, Any], lines: Mapping[Path, int]):
        self.source = source
        self.data = data
        self._lines = lines
        self._overridden: set[Path] = set()

    @classmethod
    def read(cls, source: str | os.PathLike | Mapping, label: str = "<dict>") -> "Document":
        """Raises ConfigError if the file is missing, not UTF-8, not yaml, not a mapping, or gives a key twice.

        ``label``: what a mapping is called; a file is called by its name.
        """
        if isinstance(source, Mapping):
            return cls(label, _plain(source), {})
        name = os.fspath(source)
        try:
            text = pathlib.Path(name).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read ({error.strerror or error}); expected a yaml file") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
        data, lines = _parse(name, text)
        if not isinstance(data, dict):
            what = "is empty" if data is None else f"holds {_kind(data)}"
            raise ConfigError(f"{name}: {what}; expected a mapping of decoding settings (key: value)")
        return cls(name, data, lines)

    def error(self, path: Path, problem: str) -> ConfigError:
        """An error at the key ``path``, for the caller to raise."""
        where = self.source
        if any(path[: n + 1] in self._overridden for n in range(len(path))):
            where += " (overridden)"
        elif path in self._lines:
            where += f":{self._lines[path]}"
        return ConfigError(": ".join([where, ".".join(map(str, path)), problem] if path else [where, problem]))

    def override(self, values: Mapping[str, Any], path: Path = ()) -> None:
        """Put ``values`` (nested or with dotted names; None means not given) over the data."""
        for name, value in values.items():
            if value is None:
                continue
            full = (*path, *str(name).split("."))
            if isinstance(value, Mapping) and value:
                self.override(value, full)
                continue
            block = self.data
            for part in full[:-1]:
                if not isinstance(block.get(part), dict):
                    block[part] = {}
                block = block[part]
            block[full[-1]] = _plain(value)
            self._overridden.add(full)

    def take(
        self, path: Path, rules: Mapping[str, Callable[[Any], Any]], needed: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The checked values of the mapping at ``path``. Raises ConfigError for an unknown, missing or bad key.

        ``rules``: of every valid key, a function that returns the checked value or raises ValueError with the problem.
        ``needed``: of every required key, why it is required.
        """
        block = self.data
        for part in path:
            block = block[part]
        if not isinstance(block, Mapping):
            raise self.error(path, f"is {_kind(block)}; expected a mapping with the keys {', '.join(rules)}")
        for name in block:
            if name not in rules:
                raise self._unknown(path, name, rules)
        self.need(path, block, needed or {})
        checked = {}
        for name, value in block.items():
            try:
                checked[name] = rules[name](value)
            except ValueError as error:
                raise self.error((*path, name), str(error)) from None
        return checked

    def need(self, path: Path, block: Mapping[str, Any], needed: Mapping[str, str]) -> None:
        """Raise ConfigError for the first key of ``needed`` (key -> why) that ``block``, at ``path``, lacks."""
        for name, why in needed.items():
            if name not in block:
                at = f":{self._lines[path]}" if path in self._lines else ""
                raise ConfigError(f"{self.source}{at}: {'.'.join((*path, name))}: is missing; {why}, add it")

    def _unknown(self, path: Path, name: Any, valid: Iterable[str]) -> ConfigError:
        if not isinstance(name, str):
            return self.error((*path, repr(name)), f"is {_kind(name)} as a key; expected one of {', '.join(valid)}")
        near = difflib.get_close_matches(name, valid, n=1) or difflib.get_close_matches(name.lower(), valid, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return self.error((*path, name), f"unknown key; {hint}valid keys: {', '.join(valid)}")


def _parse(name: str, text: str) -> tuple[Any, dict[Path, int]]:
    """The data of a yaml text and the line of each key. Raises ConfigError."""
    lines: dict[Path, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _index(name, node, (), lines, set())
            check_aliases(node, name, ConfigError)
            return _plain(loader.construct_document(node)), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}" if mark else ""
        what = error.problem or error.context
        raise ConfigError(f"{name}{at}: is not valid yaml: {what}; mend this line or the one above it") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: is not valid yaml: {error.reason}; remove the character") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested too deeply or refers to itself; expected a plain mapping") from error
    except (ValueError, KeyError, AttributeError) as error:
        # PyYAML lets int() and date() speak for themselves when a value looks like a number or a date but is none, and
        # trips over `!!bool abc` and `!!timestamp x`.
        raise ConfigError(
            f"{name}: holds a value that yaml cannot read ({error}); put it in quotes or mend it"
        ) from error


def _index(name: str, node: yaml.Node, path: Path, lines: dict[Path, int], seen: set[int]) -> None:
    """Note the line of every key below ``node`` and refuse keys given twice, which PyYAML would silently merge."""
    if id(node) in seen:  # an alias: indexed where its anchor stands
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _index(name, item, (*path, str(number)), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        here: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                full = (*path, key.value)
                if (key.tag, key.value) in here:
                    first = here[key.tag, key.value]
                    raise ConfigError(
                        f"{name}:{line}: {'.'.join(full)}: is given twice (first on line {first}); keep one"
                    )
                here[key.tag, key.value] = lines[full] = line
                _index(name, value, full, lines, seen)


def _plain(value: Any) -> Any:
    """A copy of dicts and lists that shares nothing, so that an override of one block leaves an aliased other alone."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing (null)" if value is None else names.get(type(value), f"a {type(value).__name__}")
