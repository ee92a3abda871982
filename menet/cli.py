"""The command line: `menet COMMAND …`, generated from the dataclasses in `menet.commands`."""

import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from menet.errors import MenetError


class Command(NamedTuple):
    """Where a command lives, and its line in the list. The module is imported only when it is called."""

    target: str
    summary: str


COMMANDS = {
    "demo": Command("menet.commands.demo:Demo", "the main job, on embedded real images"),
    "reconstruct": Command("menet.commands.reconstruct:Reconstruct", "mask image files and estimate them back"),
    "prepare": Command("menet.commands.prepare:Prepare", "write a training set of estimates, as the paper does"),
    "train": Command("menet.commands.train:Train", "train a network, with or without a defense"),
    "evaluate": Command("menet.commands.evaluate:Evaluate", "attack a model, score it on fresh masks, keep rows"),
    "audit": Command("menet.commands.audit:Audit", "check a robustness number as a careful reviewer would"),
    "certify": Command("menet.commands.certify:Certify", "how many pixels cannot turn the vote over masks"),
    "report": Command("menet.commands.report:Report", "tables and figures of a folder of records, in one page"),
    "reproduce": Command("menet.commands.reproduce:Reproduce", "the paper's tables and figures, measured anew"),
    "data list": Command("menet.commands.data_list:DataList", "which datasets there are, and which are here"),
    "data fetch": Command("menet.commands.data_get:DataFetch", "download a dataset from its publisher"),
    "data import": Command("menet.commands.data_get:DataImport", "take a dataset from files you have"),
    "data verify": Command("menet.commands.data_verify:DataVerify", "compare it with the publisher's checksums"),
    "data rank": Command("menet.commands.data_rank:DataRank", "how low the rank of its images is (figure 1)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 a check failed, 2 bad use or bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        from menet import __version__

        print(f"menet {__version__}")
        return 0
    name, rest = _longest_command(arguments)
    if name is None:
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean `menet {close[0]}`?" if close else "`menet --help` lists the commands."
        print(f"menet: there is no command {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    import tyro

    module, attribute = COMMANDS[name].target.split(":")
    command_type = getattr(importlib.import_module(module), attribute)
    try:
        with _plain_warnings(name):
            _name_optional_values(command_type)
            command = tyro.cli(
                command_type, prog=f"menet {name}", args=rest, description=inspect.getdoc(command_type)
            )
            return int(command() or 0)
    except MenetError as error:
        print(f"menet {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nmenet {name}: interrupted", file=sys.stderr)
        return 130


def _name_optional_values(command_type: type) -> None:
    """In the help, let an option that may be left out say what it takes: FLOAT, and not {None}|FLOAT."""
    import tyro

    hints = get_type_hints(command_type, include_extras=True)
    for name, hint in hints.items():
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if get_origin(hint) in (Union, UnionType) and len(kinds) == 1 and len(get_args(hint)) == 2:
            # A default of None is told in words, in the text of the option.
            hint_of_default = "" if getattr(command_type, name, "") is None else None
            named = tyro.conf.arg(metavar=_value_name(kinds[0]), help_behavior_hint=hint_of_default)
            command_type.__annotations__[name] = Annotated[hint, named]


def _value_name(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if get_origin(kind) is tuple:
        names = [_value_name(part) for part in parts if part is not Ellipsis]
        return f"[{names[0]} …]" if Ellipsis in parts else " ".join(names)
    return str(getattr(kind, "__name__", kind)).upper()


@contextmanager
def _plain_warnings(name: str) -> Iterator[None]:
    """Show the project's own warnings as one line, without the place in the code they came from."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if category.__module__.startswith("menet."):
            print(f"menet {name}: {message}", file=sys.stderr)
        else:
            usual(message, category, *place, **options)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _longest_command(arguments: list[str]) -> tuple[str | None, list[str]]:
    # `data fetch` is one command; it is looked up before `data`.
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    return None, arguments


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "menet: defend image classifiers with matrix estimation, and measure how well that works.",
            "",
            "usage: menet COMMAND [OPTIONS]      `menet COMMAND --help` explains one command",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
