"""`make soak`: thousands of damaged files, kills and full disks; prints a table, and can put it into a document.

    python tests/hostile/soak.py [--mutations 500] [--kills 20] [--write docs/reliability.md]

Every case must end in the project's own error, or in a right answer; anything else is a finding, printed with
what is needed to repeat it. The exit code is 1 if there are findings.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "data")]

MEMORY = 3 * 2**30
"""Bytes that a case may take beyond what is there before it."""
SECONDS = 30
BEGIN, END = "<!-- soak -->", "<!-- /soak -->"
TRAIN = ("train", "digits", "--limit", "300", "--epochs", "3", "--batch-size", "50", "--defense", "me-net")


@dataclass
class Tally:
    """What was tried of one kind, what survived, and what did not."""

    name: str
    tried: int = 0
    findings: list[str] = field(default_factory=list)

    def row(self) -> str:
        return f"| {self.name} | {self.tried:,} | {self.tried - len(self.findings):,} | {len(self.findings)} |"


class TooSlow(Exception):
    """A case that hangs."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the time and the memory of what is inside."""

    def stop(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Truncated, lengthened, or with bytes flipped, zeroed or exchanged."""
    kind = chance.randrange(5)
    if kind == 0 or not content:
        return content[: chance.randrange(len(content) + 1)]
    changed = bytearray(content)
    place = chance.randrange(len(changed))
    if kind == 1:
        changed[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        changed[place : place + chance.randint(1, 64)] = bytes(chance.randint(1, 64))
    elif kind == 3:
        changed[place:place] = chance.randbytes(chance.randint(1, 64))
    else:
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(min(len(changed), 400))] = chance.randrange(256)
    return bytes(changed)


def mutate(name: str, file: Path, use: Callable[[], Any], mutations: int, loses: bool = False) -> Tally:
    """Damage `file` again and again; `use` must refuse it, or return what it returns of the intact one.

    With `loses` another answer is allowed: the format has no checksum of its own.
    """
    from menet.errors import MenetError

    tally, intact, chance = Tally(name), file.read_bytes(), random.Random(name)
    expected = use()
    for number in range(mutations):
        content = damaged(intact, chance)
        file.write_bytes(content)
        tally.tried += 1
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                bounded(),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                found = use()
            if content != intact and found != expected and not loses:
                tally.findings.append(f"{name}, case {number}: accepted with another content")
        except MenetError:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            tally.findings.append(f"{name}, case {number}: {type(error).__name__}: {error!s:.200}")
    file.write_bytes(intact)
    return tally


def menet(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """One command, in a process of its own with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "menet.cli", *arguments],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def outcome(folder: Path) -> str:
    """A hash of what a command has produced: weights, and rows without their times."""
    from menet.evaluation import jsonl
    from menet.models import weights

    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.name == "best.safetensors":
            for name, tensor in sorted(weights.load(path)[0].items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
        elif path.name.endswith(".jsonl") and ".rank" in path.name:
            lines = [line.content for line in jsonl.read(path)]
            rows = sorted(
                json.dumps({key: value for key, value in line.items() if key != "seconds"}, sort_keys=True)
                for line in lines
                if "index" in line
            )
            digest.update("\n".join(rows).encode())
        elif path.suffix == ".npy":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kills(name: str, command: Callable[[Path], tuple[str, ...]], work: Path, count: int) -> Tally:
    """Kill a command at random moments, let it resume, and compare with an undisturbed one."""
    tally, chance = Tally(f"kill −9: {name}"), random.Random(name)
    whole = work / f"{name}-whole"
    began = time.monotonic()
    if menet(*command(whole)).wait() != 0:
        tally.tried, tally.findings = 1, [f"{name}: fails undisturbed"]
        return tally
    seconds, expected = time.monotonic() - began, outcome(whole)
    for number in range(count):
        folder = work / f"{name}-{number}"
        process = menet(*command(folder))
        moment = chance.random() * seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        process.kill()
        process.communicate()
        again = menet(*command(folder))
        told = again.communicate()[1]
        tally.tried += 1
        if again.returncode != 0 or outcome(folder) != expected:
            why = told.strip().splitlines()[-1:] or ["another outcome"]
            tally.findings.append(f"{name} killed after {moment:.2f} s: {why[0]}")
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def full_disk(work: Path) -> Tally:
    """Every command on a disk of 20 MB that is nearly full: one line, no traceback."""
    tally, disk = Tally("full disk of 20 MB"), work / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], check=False).returncode:
        print("no right to mount a small disk; left out", file=sys.stderr)
        return tally
    try:
        run = work / "train-whole"
        for room in (0, 64, 2048):
            for command in (
                (*TRAIN, "--out", str(disk / "run")),
                ("evaluate", str(run), "--attacks", "fgsm", "--stop", "20", "--out", str(disk / "records")),
                ("certify", str(run), "--stop", "2", "--estimation", "50", "--out", str(disk / "certificate")),
                ("audit", str(run), "--quick", "--examples", "4", "--out", str(disk / "audit.json")),
            ):
                filler = disk / "filler"
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                size = filler.stat().st_size
                os.truncate(filler, max(0, size - room * 1024))
                process = menet(*command)
                told = process.communicate()[1]
                tally.tried += 1
                if "Traceback" in told or process.returncode not in (0, 1, 2):
                    tally.findings.append(f"{command[0]} with {room} KiB left: {told.strip()[-300:]}")
                for path in disk.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=False)
    return tally


def two_at_once(work: Path, count: int) -> Tally:
    """The same training twice at the same time: one is refused, or both end with the same weights."""
    tally, expected = Tally("two processes at once"), outcome(work / "train-whole")
    for number in range(count):
        folder = work / f"both-{number}"
        both = [menet(*TRAIN, "--out", str(folder)) for _ in range(2)]
        told = [process.communicate()[1] for process in both]
        tally.tried += 1
        refused = [
            process.returncode == 2 and "locked" in words for process, words in zip(both, told, strict=True)
        ]
        done = [process.returncode == 0 for process in both]
        right = all(one or other for one, other in zip(refused, done, strict=True)) and any(done)
        if not right or outcome(folder) != expected:
            tally.findings.append(f"two trainings: {told[0].strip()[-150:]} | {told[1].strip()[-150:]}")
        shutil.rmtree(folder)
    return tally


def caches(work: Path, count: int) -> Tally:
    """Cold, warm and damaged compile caches: the same weights."""
    tally, expected = Tally("compile cache cold, warm, damaged"), outcome(work / "train-whole")
    for number in range(count):
        home = work / f"cache-{number}"
        for state in ("cold", "warm", "damaged"):
            if state == "damaged":
                chance = random.Random(number)
                for path in (one for one in home.rglob("*") if one.is_file()):
                    path.write_bytes(damaged(path.read_bytes(), chance))
            folder = work / f"cached-{number}-{state}"
            process = menet(*TRAIN, "--out", str(folder), environment={"XDG_CACHE_HOME": str(home)})
            told = process.communicate()[1]
            tally.tried += 1
            if process.returncode != 0 or outcome(folder) != expected:
                tally.findings.append(f"cache {state}: {told.strip()[-200:] or 'other weights'}")
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
    return tally


def own_formats(work: Path, mutations: int) -> Iterator[Tally]:
    """The files that menet itself writes."""
    from menet.evaluation import publish, read_folder, read_result
    from menet.models import weights
    from menet.report.collect import collect
    from menet.training import load_model

    run = work / "files"
    for command in (
        (*TRAIN, "--epochs", "1", "--out", str(run)),
        ("evaluate", str(run), "--attacks", "fgsm", "--stop", "20", "--draws", "5"),
        ("certify", str(run), "--stop", "3", "--selection", "10", "--estimation", "20"),
    ):
        process = menet(*command)
        told = process.communicate()[1]
        if process.returncode:
            raise SystemExit(f"menet {command[0]} fails undisturbed: {told}")
    records = run / "evaluation" / "fgsm.rank0.jsonl"
    yield mutate("records", records, lambda: read_folder(run / "evaluation")["fgsm"].rows, mutations)
    (packed, *_) = publish("soak", read_folder(run / "evaluation"), {}, work / "results")
    yield mutate("compact results", packed, lambda: read_result(packed).rows, mutations)
    best = run / "best.safetensors"

    def loaded() -> str:
        tensors, _ = weights.load(best)
        load_model(best)
        return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()

    yield mutate("weights", best, loaded, mutations)
    certificate = next((run / "certificate").glob("*.rank0.jsonl"))

    def reported() -> int:
        return len(collect(run).subjects)

    yield mutate("certificates, in a report", certificate, reported, mutations // 5, loses=True)
    yield mutate("records, in a report", records, reported, mutations // 5, loses=True)


def published_formats(mutations: int) -> Iterator[Tally]:
    """The files of datasets, as their publishers write them."""
    import made_files  # noqa: F401 - on the path of the tests of data
    from test_fuzzed_files import FORMATS, check_whole

    from menet.data import catalog

    for name, (make, dataset, file) in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            root = make(Path(folder) / "data")
            words = f"folder:{root}" if dataset == "folder" else dataset
            place = None if dataset == "folder" else root.parent

            def use(words: str = words, place: Path | None = place) -> bool:
                found = catalog.load(words, "test", root=place)
                check_whole(found, found)
                return True

            yield mutate(name, root / file, use, mutations, loses=True)


def main() -> int:
    """Run everything, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=500, help="damaged files per format")
    parser.add_argument("--kills", type=int, default=20, help="kills per command, and what follows from it")
    parser.add_argument("--write", type=Path, help="document whose table is replaced")
    options = parser.parse_args()
    tallies: list[Tally] = []

    def add(tally: Tally) -> None:
        tallies.append(tally)
        print(tally.row(), flush=True)
        for finding in tally.findings[:5]:
            print(f"    {finding}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for tally in (*own_formats(work, options.mutations), *published_formats(options.mutations)):
            add(tally)
        if options.kills:
            run = work / "train-whole"
            add(kills("train", lambda out: (*TRAIN, "--out", str(out)), work, options.kills))
            for name, words in (
                ("evaluate", ("--attacks", "pgd:steps=5", "--stop", "60", "--batch-size", "10", "--draws", "5")),
                ("certify", ("--stop", "20", "--batch-size", "4", "--selection", "10", "--estimation", "100")),
            ):
                command = (name, str(run), *words, "--out")
                add(kills(name, lambda out, command=command: (*command, str(out)), work, options.kills))
            add(two_at_once(work, max(1, options.kills // 4)))
            add(caches(work, max(1, options.kills // 10)))
            add(full_disk(work))
    total = Tally(
        "**all**", sum(one.tried for one in tallies), [word for one in tallies for word in one.findings]
    )
    print(total.row())
    if options.write is not None:
        lines = ["| what | tried | survived | findings |", "|---|---:|---:|---:|"]
        table = "\n".join([*lines, *(one.row() for one in (*tallies, total))])
        text = options.write.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        options.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return int(bool(total.findings))


if __name__ == "__main__":
    sys.exit(main())
