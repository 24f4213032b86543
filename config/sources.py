"""Settings from the command line, the environment and a TOML file, all generated from the structs in `config.schema`.

Later sources win: defaults < file (`--config`) < environment (`TOKENMILL_*`) < flags. Whatever is wrong with a value is
said in one line that names the flag, variable or key it came from and what is allowed there.
"""

import argparse
import difflib
import inspect
import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from config.gpu_cards import cards, planned_gpu
from config.machine import Gpu
from config.schema import Config

ENVIRONMENT_PREFIX = "TOKENMILL_"
API_KEYS_VARIABLE = ENVIRONMENT_PREFIX + "API_KEYS"  # never a flag or an entry of the file: see `config.api_keys`

_PLAN_FLAGS = ("--plan", "--plan-gpu")  # what they ask for is no setting of a server
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

_INTRO = """\
Serve a large language model to OpenAI clients over HTTP.

examples:
  serve a GGUF file on port 8000
    python -m launch --model models/SmolLM2-135M-Instruct.Q4_1.gguf

  serve a directory of safetensors under a name of your own, on a port of its choice
    python -m launch --model ./Llama-3.2-1B --served-model-name small --port 0

  see what fits into this machine's memory, without loading anything
    python -m launch --model ./Llama-3.2-1B --max-model-len 8192 --plan

  see what fits on a GPU that is not here
    python -m launch --model ./Llama-3.1-8B --max-model-len 32768 --max-seqs 64 --plan --plan-gpu 24GiB
"""

_OUTRO = """\
Every setting can also stand in the environment (the variable is named with each flag) or in a TOML file given with
--config, in a section named after its group below: [model] [server] [sdk] [tokenizer] [scheduler] [worker]
[supervisor]. A flag wins over the environment, the environment over the file.
"""


class ConfigError(Exception):
    """A setting that cannot be used; the text is one line for the user."""


class Option(Struct, frozen=True, kw_only=True):
    """One setting: a field of one of the structs that `Config` is composed of."""

    section: str
    name: str
    kind: type  # bool, int, float or str; of the items, when `many`
    many: bool
    choices: tuple[str, ...]
    meta: Meta
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    def allowed(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.meta.pattern:
            return f"a text that matches {self.meta.pattern}"
        if self.kind is str:
            return "a list of texts" if self.many else "a text"
        noun = "a whole number" if self.kind is int else "a number"
        low, high = self.meta.ge, self.meta.le
        if low is not None and high is not None:
            return f"{noun} from {low} to {high}"
        return f"{noun} of at least {low}" if low is not None else noun


class Settings(Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    config: Config
    given: frozenset[str] = frozenset()  # names of the settings that some source says, be it their default
    plan: bool = False  # only print the memory plan
    plan_gpu: Gpu | None = None  # for this GPU, which need not be here
    warnings: tuple[str, ...] = ()


def _option(section: str, field: msgspec.structs.FieldInfo, hint: Any) -> Option:
    meta = Meta()
    many = False
    choices: tuple[str, ...] = ()
    # Annotated, `| None`, tuple and Literal each peel off one layer; an alias such as PortNumber adds its own Meta.
    while get_origin(hint) is not None:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            for inner in reversed(arguments[1:]):
                bounds: Any = {  # no overload has them all, since no value has both numbers and a pattern
                    "ge": meta.ge if meta.ge is not None else inner.ge,
                    "le": meta.le if meta.le is not None else inner.le,
                    "pattern": meta.pattern or inner.pattern,
                }
                meta = Meta(description=meta.description or inner.description, **bounds)
            hint = arguments[0]
        elif origin in (Union, types.UnionType):
            (hint,) = (argument for argument in arguments if argument is not type(None))
        elif origin is tuple:
            many, hint = True, arguments[0]
        elif origin is Literal:
            choices, hint = arguments, str
        else:
            raise TypeError(f"{section}.{field.name}: no flag can be made from {hint}")
    return Option(
        section=section,
        name=field.name,
        kind=hint,
        many=many,
        choices=choices,
        meta=meta,
        default=field.default,
    )


def sections() -> dict[str, type[Struct]]:
    """The owners of settings, by the name of their section."""
    return dict(get_type_hints(Config))


def options() -> tuple[Option, ...]:
    """All settings, in the order of the structs."""
    found: list[Option] = []
    for section, owner in sections().items():
        hints = get_type_hints(owner, include_extras=True)
        found += [_option(section, field, hints[field.name]) for field in msgspec.structs.fields(owner)]
    return tuple(found)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(version: str) -> argparse.ArgumentParser:
    """The command line. Values stay text here, so that all three sources are checked by the same code."""
    parser = _Parser(
        prog="python -m launch",
        description=_INTRO,
        epilog=_OUTRO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m launch --model MODEL [options]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"tokenmill {version}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{ENVIRONMENT_PREFIX}CONFIG]")
    parser.add_argument("--plan", action="store_true", help="print what the model will take in memory, then stop")
    parser.add_argument(
        "--plan-gpu",
        metavar="GPU",
        help="with --plan: plan for this GPU, which need not be here: its memory, such as 24GiB, or one of "
        + ", ".join(card.name for card in cards()),
    )
    groups = {
        section: parser.add_argument_group(section, inspect.getdoc(owner)) for section, owner in sections().items()
    }
    for option in options():
        notes = [option.variable]
        if option.default not in (None, "", ()):
            default = ("on" if option.default else "off") if option.kind is bool else option.default
            notes.insert(0, f"default: {default}")
        if option.kind in (int, float) and (option.meta.ge is not None or option.meta.le is not None):
            notes.insert(0, option.allowed())
        text = f"{option.meta.description} [{'; '.join(notes)}]".replace("%", "%%")
        group = groups[option.section]
        if option.kind is bool:
            group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            names = {int: "N", float: "X", str: "TEXT"}
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else names[option.kind]
            if option.many:
                metavar += ",..."
            group.add_argument(option.flag, dest=option.name, metavar=metavar, help=text)
    return parser


def convert(option: Option, source: str, value: Any) -> Any:
    """`value` from flag, variable or key `source` as the setting's type, within its bounds."""
    wrong = ConfigError(f"{source}: must be {option.allowed()}, not {_shown(value)}")
    if isinstance(value, str) and not _is_unicode(value):
        raise ConfigError(f"{source}: must be UTF-8, not {_shown(value)}")  # processes are told of it in JSON
    if option.many:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
            raise wrong
        return tuple(item.strip() for item in items)
    if option.kind is bool and isinstance(value, str):
        if value.lower() not in _TRUTH:
            raise wrong
        return _TRUTH[value.lower()]
    if option.kind in (int, float) and isinstance(value, str):
        try:
            value = option.kind(value)
        except ValueError:
            raise wrong from None
    kind: Any = option.kind
    if kind in (int, float):
        kind = Annotated[kind, Meta(ge=option.meta.ge, le=option.meta.le)]
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise wrong from None
    if option.meta.pattern and re.fullmatch(option.meta.pattern, value) is None:
        raise wrong
    if (option.choices and value not in option.choices) or (option.kind is float and not math.isfinite(value)):
        raise wrong
    return value


def _is_unicode(text: str) -> bool:
    """Not so of flags and variables with bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _from_file(path: Path) -> dict[Option, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None
    known = {option.key: option for option in options()}
    values = {}
    for section, entries in document.items():
        if section not in sections() or not isinstance(entries, dict):
            places = [option.key for option in known.values() if option.name == section.replace("-", "_")]
            hint = f"; it belongs into a section: {places[0]}" if places else _nearest(section, list(sections()))
            raise ConfigError(f"{path}: unknown section or key {section!r}{hint}")
        for name, value in entries.items():
            key = f"{section}.{name.replace('-', '_')}"
            if key not in known:
                raise ConfigError(f"{path}: unknown key {section}.{name}{_nearest(key, list(known))}")
            values[known[key]] = convert(known[key], f"{path}: {key}", value)
    return values


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings for variables that look like a setting and are none; others with our prefix may be other tools'."""
    known = [option.variable for option in options()] + [ENVIRONMENT_PREFIX + "CONFIG", API_KEYS_VARIABLE]
    found = []
    for name in environ:
        flag = "--" + name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
        if name.startswith(ENVIRONMENT_PREFIX) and flag in _PLAN_FLAGS:
            found.append(f"the environment variable {name} is not a setting: {flag} is for the command line only")
        elif name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            hint = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if hint:
                found.append(f"the environment variable {name} is not a setting; did you mean {hint[0]}?")
    return tuple(found)


def read_settings(argv: Sequence[str], environ: Mapping[str, str], version: str) -> Settings:
    """Merge all sources; ConfigError for whatever is wrong, SystemExit after --help and --version."""
    namespace, extra = build_parser(version).parse_known_args(argv)
    flags = vars(namespace)
    if extra:
        known = [option.flag for option in options()] + ["--config", *_PLAN_FLAGS, "--version", "--help"]
        name = extra[0].split("=", 1)[0]
        raise ConfigError(f"unknown argument {name}{_nearest(name, known)}")
    values: dict[Option, Any] = {}
    file = flags.get("config", environ.get(ENVIRONMENT_PREFIX + "CONFIG"))
    if file:
        values |= _from_file(Path(file))
    for option in options():
        if option.variable in environ:
            values[option] = convert(option, option.variable, environ[option.variable])
        if option.name in flags:
            values[option] = convert(option, option.flag, flags[option.name])
    owners: dict[str, Any] = {
        section: owner(**{option.name: value for option, value in values.items() if option.section == section})
        for section, owner in sections().items()
    }
    config = Config(**owners)
    if not config.model.model:
        raise ConfigError("--model is missing: give a directory with safetensors, a .gguf file, or a hub id")
    return Settings(
        config=config,
        given=frozenset(option.name for option in values),
        plan="plan" in flags,
        plan_gpu=_plan_gpu(flags, config),
        warnings=_unknown_variables(environ),
    )


def _plan_gpu(flags: Mapping[str, Any], config: Config) -> Gpu | None:
    if "plan_gpu" not in flags:
        return None
    if "plan" not in flags:
        raise ConfigError("--plan-gpu: only with --plan, for which the GPU need not be here")
    if config.worker.device == "cpu":
        raise ConfigError("--plan-gpu: not with --device cpu")
    try:
        return planned_gpu(flags["plan_gpu"])
    except ValueError as error:
        raise ConfigError(f"--plan-gpu: {error}") from None
