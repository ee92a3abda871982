"""`python -m benchmarks [NAME …]`: every benchmark, or those named, on a machine with nothing else to do."""

import importlib
import pkgutil
import sys

import benchmarks

NAMES = sorted(
    module.name
    for module in pkgutil.iter_modules(benchmarks.__path__)
    if module.name not in ("__main__", "published")
)


def main(chosen: list[str]) -> int:
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in chosen or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
