"""Records the options of a script's own parser at the moment when it parses, so that nothing is trained.

Python imports this module at start-up, because ``init`` put its folder on PYTHONPATH. Parsers are patched when they are
imported: a parser parses the present command, without the ``--help`` at its end; its options and their values are
appended to ``LORA_TUNE_PARSER_FILE``, one JSON object per parser, and the process ends. The parser of a launcher
(torchrun, accelerate launch) is skipped. A process that constructs an optimizer has no supported parser, and ends, too.

It runs in the script's interpreter, with whatever packages that has: it imports only the standard library.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NoReturn

FILE = os.environ.get("LORA_TUNE_PARSER_FILE", "")
HELP = "--help"
MOST_OPTIONS = 2000

_within = [0]
"""Depth of running parsers; parsers that they call internally are not the script's."""


def _finish() -> NoReturn:
    """End the process, whatever exceptions the script catches."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or missing: nothing to flush
            continue
    os._exit(0)


def _write(parser: str, options: Iterable[Mapping[str, Any]], *, reached: bool, final: bool = True) -> None:
    """Append one record. reached: whether words appended to the command reach this parser."""
    record = {"parser": parser, "final": final, "reached": reached, "options": [*options][:MOST_OPTIONS]}
    with open(FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _option(
    flags: Iterable[str], value: Any, *, choices: Any = None, text: Any = "", outer: bool = False
) -> dict[str, Any]:
    named = [_text(choice) for choice in choices] if isinstance(choices, (list, tuple, set, frozenset)) else []
    return {
        "flags": list(flags),
        "value": _text(value, named),
        "choices": [choice for choice in named if choice is not None],
        "help": text if isinstance(text, str) else "",
        "outer": outer,
    }


def _text(value: Any, choices: Iterable[str | None] = ()) -> str | None:
    """A value as it would be typed; None if it is not a single value."""
    if isinstance(value, Enum):
        return value.name if value.name in choices else _text(value.value)
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, str)):
        return str(value)
    if isinstance(value, float):
        return repr(float(value))
    return os.fspath(value) if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str) else None


def _several(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, dict))


def _typed(args: Any) -> tuple[list[str], bool]:
    """The words to parse without a final ``--help``, and whether there was one."""
    tokens = list(sys.argv[1:] if args is None else args)
    return (tokens[:-1], True) if tokens and tokens[-1] == HELP else (tokens, False)


def _flat(values: Any, before: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and dataclasses, by dotted name."""
    if hasattr(values, "__dataclass_fields__"):
        values = {name: getattr(values, name, None) for name in values.__dataclass_fields__}
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__")
        leaves.update(_flat(value, f"{before}{key}.") if nested else {f"{before}{key}": value})
    return leaves


def _starts_a_script(values: Iterable[Any]) -> bool:
    """Whether a positional argument is a Python script to start, so that the parser is a launcher's."""
    tokens = [token for value in values for token in (value if isinstance(value, (list, tuple)) else [value])]
    return any(isinstance(token, str) and token.endswith(".py") and os.path.isfile(token) for token in tokens)


class _Argparse:
    """Replacements for argparse's methods, of a parser and of its subcommands' parsers."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.known = module.ArgumentParser.parse_known_args
        self.depth = self.whole = 0
        self.inner: list[dict[str, Any]] = []
        self.positional: list[Any] = []

    def described(self, parser: Any, values: Any, outer: bool) -> list[dict[str, Any]]:
        """The single-valued options of a parser. values: None if it rejected the command."""
        taken = [a for a in parser._actions if a.option_strings and a.nargs in (None, "?", 1) and a.dest != "help"]
        defaults = {a.dest: None if a.default == self.module.SUPPRESS else a.default for a in taken}
        return [
            _option(
                action.option_strings,
                getattr(values, action.dest, defaults[action.dest]),
                choices=action.choices,
                text=action.help,
                outer=outer,
            )
            for action in taken
        ]

    def within(self, parser: Any, args: Any, namespace: Any, *more: Any, **named: Any) -> Any:
        """Parse a subcommand's arguments, and record its options for the outer parser."""
        values = None
        try:
            values, rest = self.known(parser, args, namespace, *more, **named)
        finally:
            self.inner.extend(self.described(parser, values, False))
            self.positional.extend(self._tokens(parser, values))
        return values, rest

    def _tokens(self, parser: Any, values: Any) -> list[Any]:
        return [getattr(values, a.dest, None) for a in parser._actions if not a.option_strings]

    def record_call(self, parser: Any, args: list[str], *, reached: bool, final: bool) -> bool:
        """Record a parser's options; False for a launcher's parser."""
        self.inner, self.positional, values = [], [], None
        self.depth += 1
        try:
            values, _ = self.known(parser, args)
        except SystemExit:  # it rejects the command; its defaults are still known
            values = None
        finally:
            self.depth -= 1
        remainder = any(not a.option_strings and a.nargs == self.module.REMAINDER for a in parser._actions)
        module = remainder and getattr(values, "module", False) is True  # torchrun -m
        if module or _starts_a_script(self._tokens(parser, values) + self.positional):
            return False
        options = [*self.inner, *self.described(parser, values, bool(self.inner))]
        _write("argparse", options, reached=reached, final=final)
        return True


def _argparse(module: Any) -> None:
    """A parser that handles ``--help`` would end the script: it ends here. Others continue."""
    calls = _Argparse(module)
    whole = module.ArgumentParser.parse_args

    @functools.wraps(calls.known)
    def parse_known_args(self: Any, args: Any = None, namespace: Any = None, *more: Any, **named: Any) -> Any:
        if _within[0]:
            return calls.known(self, args, namespace, *more, **named)
        if calls.depth:
            return calls.within(self, args, namespace, *more, **named)
        tokens, reached = _typed(args)
        final = bool(calls.whole) or self.add_help
        if calls.record_call(self, tokens, reached=reached, final=final) and final:
            _finish()
        _within[0] += 1
        try:
            return calls.known(self, args, namespace, *more, **named)
        finally:
            _within[0] -= 1

    @functools.wraps(whole)
    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        calls.whole += 1
        try:
            return whole(self, args, namespace)
        finally:
            calls.whole -= 1

    module.ArgumentParser.parse_known_args, module.ArgumentParser.parse_args = parse_known_args, parse_args


def _click(module: Any) -> None:
    command = module.Command
    make, parse, invoke = command.make_context, command.parse_args, command.invoke
    reached = [False]

    def described(self: Any, values: Mapping[str, Any] | None, ctx: Any) -> list[dict[str, Any]]:
        taken = [p for p in self.params if p.param_type_name == "option" and not (p.is_flag or p.multiple or p.count)]
        return [
            _option(
                [*p.opts, *p.secondary_opts],
                p.get_default(ctx, call=False) if values is None else values.get(p.name),
                choices=getattr(getattr(p, "type", None), "choices", None),
                text=p.help,
            )
            for p in taken
            if p.nargs == 1
        ]

    @functools.wraps(make)
    def make_context(self: Any, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        tokens, helped = _typed(args)
        reached[0] = reached[0] or helped
        return make(self, info_name, tokens, parent=parent, **extra)

    @functools.wraps(parse)
    def parse_args(self: Any, ctx: Any, args: Any) -> Any:
        _write("click", described(self, None, ctx), reached=reached[0], final=False)
        return parse(self, ctx, args)

    @functools.wraps(invoke)
    def run(self: Any, ctx: Any) -> Any:
        if ctx.invoked_subcommand is not None or _starts_a_script(ctx.params.values()):
            return invoke(self, ctx)
        _write("click", described(self, ctx.params, ctx), reached=reached[0])
        _finish()

    command.make_context, command.parse_args, command.invoke = make_context, parse_args, run


def _absl(module: Any) -> None:
    parse = module.FlagValues.__call__

    def described(self: Any) -> list[dict[str, Any]]:
        options = []
        for place, flags in self.flags_by_module_dict().items():
            for flag in flags:
                value = flag.value if flag.present or flag.value is not None else flag.default
                if place.startswith("absl.") or flag.boolean or _several(value):
                    continue
                if hasattr(value, "to_dict"):
                    leaves = _flat(value.to_dict())
                    options += [_option([f"--{flag.name}.{n}"], v) for n, v in leaves.items() if not _several(v)]
                    continue
                flags_of = [f"--{flag.name}", *([f"-{flag.short_name}"] if flag.short_name else [])]
                choices = getattr(flag.parser, "enum_values", None)
                options.append(_option(flags_of, value, choices=choices, text=flag.help))
        return options

    @functools.wraps(parse)
    def call(self: Any, argv: Any, known_only: bool = False) -> Any:
        tokens, reached = _typed(argv)
        try:
            parse(self, tokens, known_only=known_only)
        except Exception:  # noqa: BLE001  # it rejects the command; its defaults are still known
            self.mark_as_parsed()
        _write("absl", described(self), reached=reached)
        _finish()

    module.FlagValues.__call__ = call


def _jsonargparse(module: Any) -> None:
    """jsonargparse, on which LightningCLI is built."""
    parse = module.ArgumentParser.parse_args

    @functools.wraps(parse)
    def parse_args(self: Any, args: Any = None, *more: Any, **named: Any) -> Any:
        if _within[0]:  # of a subcommand
            return parse(self, args, *more, **named)
        tokens, reached = _typed(args)
        _within[0] += 1
        values = parse(self, tokens, *more, **named)
        command = getattr(values, "subcommand", None)
        before = f"{command}." if isinstance(command, str) else ""
        leaves = {key: value for key, value in values.items() if not _several(value)}
        options = [
            _option([f"--{key[len(before) :]}"], value, outer=not key.startswith(before))
            for key, value in leaves.items()
            if key != "subcommand" and not isinstance(value, bool)
        ]
        _write("jsonargparse", options, reached=reached)
        _finish()

    module.ArgumentParser.parse_args = parse_args


def _hydra(module: Any) -> None:
    original = module.main

    @functools.wraps(original)
    def main(*settings: Any, **named: Any) -> Any:
        decorate = original(*settings, **named)

        def wrapped(task: Callable[..., Any]) -> Any:
            state = {"reached": False}

            def write(config: Any) -> None:
                from omegaconf import OmegaConf  # type: ignore[import-not-found,unused-ignore]

                try:
                    values = OmegaConf.to_container(config, resolve=True)
                except Exception:  # noqa: BLE001  # some references resolve only in a run
                    values = OmegaConf.to_container(config, resolve=False)
                leaves = _flat(values)
                options = [_option([name], value) for name, value in leaves.items() if not _several(value)]
                _write("hydra", options, reached=state["reached"])
                _finish()

            ask: Any = functools.wraps(task)(write)
            ask.__code__ = ask.__code__.replace(co_filename=task.__code__.co_filename)  # configs are relative
            inner = decorate(ask)

            @functools.wraps(task)
            def run(*arguments: Any, **keywords: Any) -> Any:
                tokens, state["reached"] = _typed(None)
                place = tempfile.mkdtemp()
                sys.argv[1:] = [*tokens, f"hydra.run.dir={place}", "hydra.output_subdir=null"]
                _within[0] += 1
                return inner(*arguments, **keywords)

            return run

        return wrapped

    module.main = main


def _tyro(module: Any) -> None:
    original = module.cli

    @functools.wraps(original)
    def cli(f: Any, *more: Any, **named: Any) -> Any:
        tokens, reached = _typed(named.get("args"))
        _within[0] += 1
        if inspect.isfunction(f):
            values: Any = _defaults(f)
        else:
            values = original(f, *more, **{**named, "args": tokens})
        options = [
            _option(["--" + name.replace("_", "-"), "--" + name], value)
            for name, value in _flat(values).items()
            if not _several(value) and not isinstance(value, bool)
        ]
        _write("tyro", options, reached=reached)
        _finish()

    module.cli = cli


def _defaults(function: Any) -> dict[str, Any]:
    """A function's default arguments; None for parameters without one."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: None if p.default is p.empty else p.default for p in named}


def _fire(module: Any) -> None:
    @functools.wraps(module.Fire)
    def fire(component: Any = None, command: Any = None, *more: Any, **named: Any) -> Any:
        tokens, reached = _typed(command.split() if isinstance(command, str) else command)
        known = inspect.currentframe().f_back.f_globals if component is None else component  # type: ignore[union-attr]
        for token in tokens:
            if callable(known) and not inspect.isclass(known):
                break
            name = token.replace("-", "_")
            known = known.get(name, known) if isinstance(known, Mapping) else getattr(known, name, known)
        options = []
        if callable(known):
            values = {name: v for name, v in _defaults(known).items() if not _several(v) and not isinstance(v, bool)}
            options = [_option([f"--{name}"], value) for name, value in values.items()]
        _write("fire", options, reached=reached)
        _finish()

    module.Fire = fire


def _docopt(module: Any) -> None:
    original = module.docopt

    @functools.wraps(original)
    def docopt(doc: Any, argv: Any = None, *more: Any, **named: Any) -> Any:
        tokens, reached = _typed(argv)
        values = original(doc, tokens, *more, **named)
        options = [_option([n], v) for n, v in values.items() if n.startswith("-") and not isinstance(v, bool)]
        _write("docopt", options, reached=reached)
        _finish()

    module.docopt = docopt


def _optparse(module: Any) -> None:
    original = module.OptionParser.parse_args

    @functools.wraps(original)
    def parse_args(self: Any, args: Any = None, values: Any = None) -> Any:
        tokens, reached = _typed(args)
        today, _ = original(self, tokens, values)
        taken = [o for o in self.option_list if o.takes_value() and o.nargs == 1]
        options = [
            _option([*o._long_opts, *o._short_opts], getattr(today, o.dest, None), choices=o.choices, text=o.help)
            for o in taken
        ]
        _write("optparse", options, reached=reached)
        _finish()

    module.OptionParser.parse_args = parse_args


def _omegaconf(module: Any) -> None:
    """``OmegaConf.merge(defaults, OmegaConf.from_cli())``: the command's words merged over a config."""
    kind = module.OmegaConf
    from_cli, merge = kind.from_cli, kind.merge
    typed: list[Any] = []

    def read(args_list: Any = None) -> Any:
        if _within[0]:
            return from_cli(args_list)
        tokens, reached = _typed(args_list)
        typed[:] = [from_cli(tokens), reached]
        return typed[0]

    def merged_options(*configs: Any) -> Any:
        whole = merge(*configs)
        if typed and any(config is typed[0] for config in configs):
            leaves = _flat(kind.to_container(whole, resolve=False))
            _write("omegaconf", [_option([n], v) for n, v in leaves.items() if not _several(v)], reached=typed[1])
            _finish()
        return whole

    kind.from_cli, kind.merge = staticmethod(read), staticmethod(merged_options)


def _hf_argparser(module: Any) -> None:
    """A config file in place of options: its values are read from the file itself."""

    def parse_dict(self: Any, *arguments: Any, **named: Any) -> NoReturn:
        _write("file", [], reached=False)
        _finish()

    module.HfArgumentParser.parse_dict = parse_dict


def _optimizer(module: Any) -> None:
    def begin(self: Any, *arguments: Any, **named: Any) -> NoReturn:
        _finish()

    module.Optimizer.__init__ = begin


PATCHES: dict[str, Callable[[Any], None]] = {
    "absl.flags._flagvalues": _absl,
    "argparse": _argparse,
    "click.core": _click,
    "docopt": _docopt,
    "fire.core": _fire,
    "hydra.main": _hydra,
    "jsonargparse._core": _jsonargparse,
    "omegaconf.omegaconf": _omegaconf,
    "optparse": _optparse,
    "torch.optim.optimizer": _optimizer,
    "transformers.hf_argparser": _hf_argparser,
    "typer._click.core": _click,
    "tyro._cli": _tyro,
}
"""Module -> function that patches it after import. Add a row for another parser."""


class _Finder:
    """Import hook that finds the modules of ``PATCHES`` as usual, and patches them after loading."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                patch(module)
            except AttributeError:  # another version of the library: init reads the help text instead
                return

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    folder_of_hook = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != folder_of_hook]
    if FILE:
        sys.meta_path.insert(0, _Finder())
        for name in [name for name in PATCHES if name in sys.modules]:
            PATCHES.pop(name)(sys.modules[name])
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the one that would have been imported without this folder
    except ImportError:
        if hidden is not None:
            sys.modules["sitecustomize"] = hidden


if __name__ == "sitecustomize":
    _begin()
