"""Help that teaches: what people use first, or every option by section; completion and a commented configuration.

Every word of it is a docstring of the option it explains.
"""

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from tyro.conf import Positional

from splitcast.base.config import SCHEME_SECTIONS, SECTIONS, Config

FIRST = (
    *("scheme", "cut", "arch", "task", "dataset", "clients", "partition", "rounds", "batch", "local_steps", "lr"),
    *("optimizer", "uplink_codec", "eval_every", "seed", "device", "policy", "bandwidth_hz"),
)
"""Of the settings, what people use first; of a command's own options all are shown."""

UNUSED: dict[str, tuple[str, ...]] = {
    "plan": ("eval_every", "eval_samples", "eval_clients", "stop_at", "checkpoint_every", "clip_norm"),
    "learn": ("eval_every", "eval_samples", "eval_clients", "stop_at", "checkpoint_every", "clip_norm"),
}
"""Settings that a command has no use for: refused as flags, welcome in a configuration that serves other commands."""


@dataclass(frozen=True)
class Option:
    """One word or flag of a command."""

    section: str
    name: str
    default: Any
    text: str
    positional: bool = False

    @property
    def flag(self) -> str:
        """As it is typed."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


@cache
def texts(kind: type) -> Mapping[str, str]:
    """The docstring of every field of a dataclass, in one line each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        told = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        if told and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = " ".join(text.value.value.split())  # type: ignore[attr-defined]
    return found


def options(kind: type, command: str) -> Iterator[Option]:
    """The options of a command, its own first."""
    hints, made = get_type_hints(kind, include_extras=True), []
    for field in fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if isinstance(default, Config):
            made += list(_settings(command))
        elif is_dataclass(default):
            said = texts(default.__class__)
            made += [Option("", leaf.name, getattr(default, leaf.name), said[leaf.name]) for leaf in fields(default)]
        else:
            positional = Positional in get_args(hints[field.name]) or "Positional" in repr(hints[field.name])
            made.append(Option("", field.name, default, texts(kind).get(field.name, ""), positional))
    yield from sorted(made, key=lambda option: bool(option.section))


def _settings(command: str) -> Iterator[Option]:
    for section, kind in SECTIONS.items():
        prefix = f"{section}." if section in SCHEME_SECTIONS else ""
        for field in fields(kind):
            if field.name not in UNUSED.get(command, ()):
                yield Option(section, prefix + field.name, getattr(kind(), field.name), texts(kind)[field.name])


def unused_flag(command: str, flag: str) -> bool:
    """Whether a flag is a setting that the command has no use for."""
    return flag.removeprefix("--").replace("-", "_") in UNUSED.get(command, ())


def help_text(kind: type, command: str, *, everything: bool = False) -> str:
    """What --help prints, or --help-all."""
    known = list(options(kind, command))
    words = " ".join(f"[{option.flag}]" for option in known if option.positional)
    width = min(120, max(72, shutil.get_terminal_size((120, 40)).columns))
    lines = [f"usage: splitcast {command} {words + ' ' if words else ''}[options]", ""]
    lines += textwrap.wrap(" ".join((kind.__doc__ or "").split()), width)
    settings = any(option.section for option in known)
    own = [option for option in known if not option.section]
    if settings and not everything:
        first = [option for name in FIRST for option in known if option.section and option.name == name]
        lines += ["", "used first (--help-all lists every one; --config FILE reads them from TOML):"]
        lines += _rows(first, width, brief=True)
    lines += ["", f"options of {command}:" if settings else "options:", *_rows(own, width, brief=False)]
    for section, kind_ in SECTIONS.items() if everything and settings else ():
        mine = [option for option in known if option.section == section]
        if mine:
            lines += ["", f"[{section}] {' '.join((kind_.__doc__ or '').split())}", *_rows(mine, width, brief=False)]
    return "\n".join(lines) + "\n"


def _rows(known: list[Option], width: int, *, brief: bool) -> list[str]:
    lines = []
    column = min(22, max((len(option.flag) for option in known), default=0))
    for option in known:
        said = option.text.split(". ")[0].rstrip(".") if brief else option.text
        default = _default(option)
        text = f"{said} [{default}]" if default else said
        wrapped = textwrap.wrap(text, width - column - 3, break_on_hyphens=False) or [""]
        if len(option.flag) > column:
            lines.append(f"  {option.flag}")
            lines += [" " * (column + 3) + line for line in wrapped]
        else:
            lines.append(f"  {option.flag:{column}} {wrapped[0]}")
            lines += [" " * (column + 3) + line for line in wrapped[1:]]
    return lines


def _default(option: Option) -> str:
    """The default in words; none where the text says it."""
    value = option.default
    if "efault" in option.text or value is None or value is False or value in ("", ()) or option.positional:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def completion(shell: str, commands: Mapping[str, type]) -> str:
    """A script that completes commands and flags in bash or zsh."""
    flags = {name: " ".join(o.flag for o in options(kind, name) if not o.positional) for name, kind in commands.items()}
    cases = "\n".join(f"    {name}) words={json.dumps(text + ' --help --help-all')} ;;" for name, text in flags.items())
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{zsh}_splitcast() {{
  local words={json.dumps(" ".join(commands))} current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _splitcast splitcast
"""


def commented_config() -> str:
    """Every setting with its default and what it means, as TOML."""
    lines = ["# Settings of a training; splitcast train --config FILE. Lines may be left out: these are the defaults."]
    for section, kind in SECTIONS.items():
        lines += [
            "",
            *textwrap.wrap(" ".join((kind.__doc__ or "").split()), 110, initial_indent="# ", subsequent_indent="# "),
        ]
        lines += [f"[{section}]"]
        for field in fields(kind):
            text = texts(kind)[field.name]
            lines += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")
            lines += [f"{field.name} = {json.dumps(getattr(kind(), field.name), ensure_ascii=False)}"]
    return "\n".join(lines) + "\n"
