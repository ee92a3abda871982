"""A report as one HTML file that asks for nothing outside itself."""

import base64

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from menet.report.contents import Picture, Report


def page(report: Report) -> str:
    """The whole page: style inline, pictures as data, every name escaped."""
    environment = Environment(
        loader=PackageLoader("menet.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = _source
    return environment.get_template("page.html.jinja").render(report=report)


def _source(picture: Picture) -> Markup:
    kind, content = ("svg+xml", picture.svg()) if isinstance(picture.content, Figure) else ("png", picture.png())
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")
