"""`menet serve`: a page to see the defense, attack it and certify it; `menet explore`: the same as one file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from menet.commands import Json, Output, printing
from menet.commands.options import Root
from menet.errors import ConfigurationError

if TYPE_CHECKING:
    from menet.web.explorer import Networks

RunOption = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="RUN",
        help="The defended network: a run folder or weights file of `menet train`, or a name of "
        "`menet models list`. Default: mnist-menet-adversarial, with mnist-vanilla as the bare network "
        "and mnist-menet-certified for certificates.",
        help_behavior_hint="",
    ),
]
BareOption = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="RUN",
        help="An undefended network to compare with. Default: the classifier behind the defense.",
        help_behavior_hint="",
    ),
]
CertifiedOption = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="RUN",
        help="A ME-Net with small p for the certificates. Default: the defended network.",
        help_behavior_hint="",
    ),
]
DataOption = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME",
        help="Dataset of the sample images. Default: the one that RUN was trained on.",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True)
class Serve:
    """Show a page in the browser: reconstruct images, attack networks step by step, and certify predictions.

    Everything is computed on this machine, and the page loads nothing from elsewhere. It listens on the loopback
    address alone unless --host says otherwise; it has no login, so open it only to a network that you trust.
    Ctrl-C stops the server and all it started.
    """

    run: RunOption = None

    bare: BareOption = None

    certified: CertifiedOption = None

    data: DataOption = None

    root: Root = None

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""

    port: int = 8000
    """Port to listen on; 0 for a free one."""

    seconds: float = 30.0
    """Longest computation of one request."""

    memory: int = 2048
    """Megabytes that the requests of one worker may take."""

    def __call__(self) -> int:
        if not (self.seconds > 0 and self.memory >= 256 and 0 <= self.port < 65536):
            raise ConfigurationError(
                f"expected seconds > 0, memory >= 256 and 0 <= port < 65536, got {self.seconds:g}, {self.memory} "
                f"and {self.port}"
            )
        from menet.web import Server
        from menet.web.workers import Limits, Refused, workers

        networks = networks_of(self.run, self.bare, self.certified, self.data, self.root)
        lanes = workers(networks, Limits(self.seconds, self.memory))
        try:
            server = Server((self.host, self.port), lanes)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}; choose another --port"
            ) from error
        try:
            print("starting two workers…", flush=True)
            for lane in lanes:
                lane.start()
            print(f"open {server.url} in a browser; Ctrl-C stops the server", flush=True)
            server.serve_forever()
        except Refused as error:
            raise ConfigurationError(f"a worker failed to start: {error}") from error
        finally:
            server.close()
        return 0


@dataclass(frozen=True)
class Explore:
    """Write the page of `menet serve` as one file, with everything computed beforehand for a dozen images.

    The file opens from disk in any browser, without a server and without a network. Sliders move over the
    settings that were computed.
    """

    export: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("page.html")
    """The HTML file to write."""

    run: RunOption = None

    bare: BareOption = None

    certified: CertifiedOption = None

    data: DataOption = None

    root: Root = None

    quick: bool = False
    """Fewer settings: a file of a few hundred kilobytes, made in seconds."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.files import write_atomically

        networks = networks_of(self.run, self.bare, self.certified, self.data, self.root)
        from menet.web import render
        from menet.web.explorer import Explorer, Grid, static_answers

        grid = Grid()
        if self.quick:
            grid = replace(
                grid, p=(0.3, 0.5, 0.8), epsilon=(0.1, 0.2), painted=(0, 2, 10), steps=6, draws=5, frames=4
            )
        page = render(static_answers(Explorer(networks), grid))
        write_atomically(self.export, page)
        out.value(written=self.export, bytes=len(page.encode()))
        print(f"wrote {self.export} ({len(page.encode()) / 1e6:.1f} MB)")
        return 0


def networks_of(
    run: str | None, bare: str | None, certified: str | None, data: str | None, root: Path | None
) -> "Networks":
    """The networks that the options name; without a run those that come with the package."""
    from menet.web.explorer import Networks

    if run is None:
        if bare is not None or certified is not None or data is not None:
            raise ConfigurationError("expected --run, the defended network, beside --bare, --certified or --data")
        return Networks(
            defended="mnist-menet-adversarial",
            bare="mnist-vanilla",
            certified="mnist-menet-certified",
            epsilon=0.2,
            note="The networks, for MNIST, come with menet; the defended one was trained on adversarial "
            "examples. The digits are of the set they were trained on.",
        )
    from menet.commands.options import check_dataset, epsilon_of, trained_on
    from menet.training.pretrained import locate

    for name in filter(None, (run, bare, certified)):
        if not locate(name).exists():
            raise ConfigurationError(f"expected a run folder or weights file, got {name!r}, which does not exist")
    dataset = data or trained_on(run)
    name = check_dataset(dataset)
    return Networks(
        run,
        bare,
        certified,
        dataset=name,
        root=None if root is None else str(root),
        epsilon=round(epsilon_of(None, name), 2),
        note=f"The defended network is {run}, of the dataset {dataset}.",
    )
