"""The command line: `menet COMMAND …`, generated from the dataclasses in `menet.commands`.

Nothing heavy is imported before a command runs: `menet --help` and `menet COMMAND --help` do without torch.
"""

import _thread
import difflib
import errno
import importlib
import inspect
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from menet.errors import MenetError

RESUME = "rerun the same command to resume"
NOTHING = "nothing was written"
SECONDS_BETWEEN_INTERRUPTS = 0.2


class Command(NamedTuple):
    """Where a command lives, its line in the overview, and what an interruption leaves behind."""

    target: str
    summary: str
    interrupted: str


COMMANDS = {
    "demo": Command(
        "menet.commands.demo:Demo",
        "train, attack, certify and report on embedded real images",
        f"finished networks and attacks are kept; {RESUME}",
    ),
    "reconstruct": Command(
        "menet.commands.reconstruct:Reconstruct", "mask image files and estimate them back", NOTHING
    ),
    "prepare": Command(
        "menet.commands.prepare:Prepare",
        "write a training set of estimates, as the paper does",
        f"finished shards are kept; {RESUME}",
    ),
    "train": Command(
        "menet.commands.train:Train",
        "train a network, with or without a defense",
        f"the last checkpoint is kept; {RESUME}",
    ),
    "evaluate": Command(
        "menet.commands.evaluate:Evaluate",
        "attack a model and score it on fresh random draws",
        f"the records of finished batches are kept; {RESUME}",
    ),
    "audit": Command(
        "menet.commands.audit:Audit",
        "check a robustness claim as a careful reviewer would",
        f"the findings of finished checks are kept; {RESUME}",
    ),
    "certify": Command(
        "menet.commands.certify:Certify",
        "certify accuracy against perturbed pixels",
        f"the records of finished batches are kept; {RESUME}",
    ),
    "report": Command("menet.commands.report:Report", "show records as tables and figures on one page", NOTHING),
    "publish": Command("menet.commands.report:Publish", "pack records into compact results and a board", NOTHING),
    "compare": Command("menet.commands.report:Compare", "compare two models on the same examples", NOTHING),
    "reproduce": Command(
        "menet.commands.reproduce:Reproduce",
        "measure the paper's tables and figures again",
        f"finished jobs and checkpoints of unfinished ones are kept; {RESUME}",
    ),
    "serve": Command(
        "menet.commands.serve:Serve",
        "a page in the browser: reconstruct, attack, certify",
        "the server has stopped; trained networks are kept",
    ),
    "explore": Command("menet.commands.serve:Explore", "the same page as one file that needs no server", NOTHING),
    "doctor": Command("menet.commands.doctor:Doctor", "versions, devices, self-test: for a bug report", NOTHING),
    "completion": Command("menet.commands.doctor:Completion", "commands and options by the tab key", NOTHING),
    "models list": Command("menet.commands.models:ModelsList", "list the networks of the package", NOTHING),
    "models show": Command("menet.commands.models:ModelsShow", "the card of a network of the package", NOTHING),
    "models pack": Command("menet.commands.models:ModelsPack", "pack a run into a small file", NOTHING),
    "models measured": Command(
        "menet.commands.models:ModelsMeasured", "write published results into the cards", NOTHING
    ),
    "data list": Command("menet.commands.data:DataList", "list the datasets, and which are installed", NOTHING),
    "data fetch": Command(
        "menet.commands.data:DataFetch",
        "download a dataset from its publisher",
        f"what is downloaded is kept; {RESUME}",
    ),
    "data import": Command(
        "menet.commands.data:DataImport", "import a dataset from files you have", "nothing was replaced"
    ),
    "data verify": Command(
        "menet.commands.data:DataVerify", "compare a dataset with its publisher's checksums", NOTHING
    ),
    "data rank": Command(
        "menet.commands.data:DataRank", "draw the approximate rank of a dataset's images (figure 1)", NOTHING
    ),
}


def run() -> NoReturn:
    """The console script: one command, and its exit code.

    After that an interrupt is ignored, as there is nothing left to interrupt: while Python shuts down, it would
    kill the process.
    """
    # Torch's idle threads spin for milliseconds on cores that the compiled loops of the estimators then lack: 128
    # estimates take a quarter less time beside threads that soon sleep. OpenMP reads this when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = main()
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        print(f"\nmenet: interrupted; {NOTHING}", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


EXIT_CODES = {
    0: "done",
    1: "a check failed",
    2: "invalid usage or input",
    130: "interrupted",
    141: "nobody reads the output",
}

OUTPUT_FULL = (errno.ENOSPC, errno.EDQUOT)
OUTPUT_FAILED = (*OUTPUT_FULL, errno.EROFS, errno.EFBIG, errno.EIO)
"""Errors of a file that is being written, which do not always carry its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of `EXIT_CODES`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(COMMANDS))
        return 0
    if arguments[0] in ("-V", "--version"):
        from menet import __version__

        print(f"menet {__version__}")
        return 0
    modules = []
    while arguments[:1] == ["--import"] and len(arguments) > 2:
        modules.append(arguments[1])
        del arguments[:2]
    name, rest = _longest_command(arguments)
    if name is None:
        return _unknown(arguments)
    with _Interrupts() as interrupts:
        try:
            with _plain_warnings(name):
                return int(_parsed(name, rest, modules)() or 0)
        except (Exception, KeyboardInterrupt) as error:
            if interrupts.count or isinstance(error, KeyboardInterrupt):
                interrupts.end()
                print(f"\nmenet {name}: interrupted; {COMMANDS[name].interrupted}", file=sys.stderr)
                return 130
            if isinstance(error, BrokenPipeError):
                # Whoever read the output has left, as `head` does. What is still to be written goes nowhere.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            if isinstance(error, OSError) and (error.filename is not None or error.errno in OUTPUT_FAILED):
                where = "" if error.filename is None else f": {error.filename}"
                full = error.errno in OUTPUT_FULL
                remedy = "; free some space and rerun the same command to resume" if full else ""
                print(f"menet {name}: {error.strerror}{where}{remedy}", file=sys.stderr)
                return 2
            if not isinstance(error, MenetError):
                raise
            print(f"menet {name}: {error}", file=sys.stderr)
            return 2


class _Interrupts:
    """Ctrl-C inside a `with` block as a `KeyboardInterrupt` that arrives.

    Raised in the middle of an import it is swallowed there, or breaks the library; elsewhere, too, a library may
    swallow it and go on. So it waits for the end of an import, and is raised again until it is being handled.
    A second Ctrl-C does not wait.
    """

    def __init__(self) -> None:
        self.count = 0
        """Interrupts by the user so far."""
        self._over = self._repeating = False
        # Of `_thread`, because a handler may interrupt the code of `threading` that holds its locks.
        self._lock = _thread.allocate_lock()
        self._before = signal.getsignal(signal.SIGINT)
        main_thread = threading.current_thread() is threading.main_thread()
        self._ours = main_thread and self._before is signal.default_int_handler

    def __enter__(self) -> "_Interrupts":
        if self._ours:
            signal.signal(signal.SIGINT, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._ours:
            signal.signal(signal.SIGINT, self._before)

    def end(self) -> None:
        """Raise no more: the command is over."""
        with self._lock:
            self._over = True

    def _notice(self, number: int, frame: FrameType | None) -> None:
        repeated, self._repeating = self._repeating, False
        if self._over:
            return
        if not repeated:
            self.count += 1
            if self.count == 1:
                _thread.start_new_thread(self._repeat, ())
        urgent = not repeated and self.count > 1
        if not urgent and (_is_importing(frame) or _is_handled()):
            return
        signal.default_int_handler(number, frame)

    def _repeat(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN_INTERRUPTS)
            with self._lock:
                if self._over:
                    return
                self._repeating = True
                if hasattr(signal, "pthread_kill"):
                    # A true signal, which also ends a system call that waits.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                else:
                    _thread.interrupt_main()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_handled() -> bool:
    """Whether the signal hit an `except`, `finally` or `with` that cleans up after an interrupt."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _parsed(name: str, arguments: list[str], modules: Sequence[str] = ()) -> Any:
    """The command `name` with its options; exits after showing help or an error of usage.

    `modules` of the user's own are imported first: estimators and defenses register themselves.
    """
    import tyro

    for one in modules:
        from menet.commands.options import imported

        imported(one)
    module, attribute = COMMANDS[name].target.split(":")
    command_type = getattr(importlib.import_module(module), attribute)
    _name_optional_values(command_type)
    description = _wrapped(inspect.getdoc(command_type) or "")
    # A flag is there or not: no `--no-json` beside `--json`.
    config = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(command_type, prog=f"menet {name}", args=arguments, description=description, config=config)


def _wrapped(text: str) -> str:
    """A docstring in lines that fit the terminal; indented lines, which are examples, stay as they are."""
    width = min(shutil.get_terminal_size().columns, 100)
    parts = []
    for part in text.split("\n\n"):
        # tyro joins lines, except those that begin with a space.
        lines = part.splitlines() if part[0] == " " else textwrap.wrap(part, width - 1)
        parts.append("\n".join(f" {line}" for line in lines))
    return "\n\n".join(parts)


def _unknown(arguments: list[str]) -> int:
    """Say which command may be meant; a group such as `data` lists its own commands."""
    group = {name: command for name, command in COMMANDS.items() if name.startswith(f"{arguments[0]} ")}
    names = [name.removeprefix(f"{arguments[0]} ") for name in group]
    if group and arguments[1:2] in (["-h"], ["--help"]):
        print(_overview(group))
        return 0
    if group:
        remedy = f"`menet {arguments[0]} --help` explains them"
        got = f"got {arguments[1]!r}" if arguments[1:] else "got none"
        print(f"menet {arguments[0]}: expected one of {', '.join(names)}, {got}; {remedy}", file=sys.stderr)
        return 2
    close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
    hint = f"did you mean `menet {close[0]}`?" if close else "`menet --help` lists the commands"
    print(f"menet: unknown command {arguments[0]!r}; {hint}", file=sys.stderr)
    return 2


def _name_optional_values(command_type: type) -> None:
    """In help, show what an optional option takes: FLOAT, not {None}|FLOAT."""
    import tyro

    hints = get_type_hints(command_type, include_extras=True)
    for name, hint in hints.items():
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if get_origin(hint) in (Union, UnionType) and len(kinds) == 1 and len(get_args(hint)) == 2:
            # The help text says what a default of None means.
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
    """Show warnings of this package as one line, without their place in the code."""
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
    # `data fetch` is one command, so two words are tried before one.
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    return None, arguments


def _overview(commands: dict[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            "menet: defend image classifiers with matrix estimation; measure how robust they are",
            "",
            "usage: menet COMMAND [OPTIONS]      `menet COMMAND --help` explains one command",
            "       menet --import MODULE COMMAND [OPTIONS]      with estimators and defenses of your own, which",
            "                                                    register themselves: its code is executed",
            "",
            *lines,
            "",
            "exit codes",
            *(f"  {code:<{width}}  {meaning}" for code, meaning in EXIT_CODES.items()),
            "",
            "`menet --version` prints the version.",
        ]
    )


if __name__ == "__main__":
    run()
