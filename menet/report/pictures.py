"""Clean, adversarial and their difference, with and without the estimator (the paper's last figure)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from menet.evaluation.pictures import unpack
from menet.evaluation.records import Records
from menet.report.reconstruction import show_image
from menet.report.style import INK, sheet, styled

WRONG = "#b3261e"


def portraits(records: Records, most: int = 4) -> Figure | None:
    """One example per row: clean, adversarial, difference; behind a preprocessing also what the network sees.

    Below each image stand the predicted class and its probability, red where it is wrong. The difference is
    scaled to be seen; gray is no change.
    """
    rows = [row for row in records.rows if "pictures" in row][:most]
    if not rows:
        return None
    names = records.evaluation["dataset"].get("class_names") or []
    seen = "clean_seen" in rows[0]["pictures"]
    columns = ["clean", "adversarial", "difference"] + (["clean_seen", "adversarial_seen"] if seen else [])
    scale = _scale(rows)
    defense = records.evaluation["model"].get("defense") or {}
    done = "estimated" if defense.get("name") == "me-net" else "processed"
    titles = {
        "clean": "clean",
        "adversarial": "adversarial",
        "difference": f"difference ×{scale:g}",
        "clean_seen": f"clean,\n{done}",
        "adversarial_seen": f"adversarial,\n{done}",
    }
    with styled():
        # Five columns are shown as wide as three, so their words are larger.
        words_size = 11 if seen else 9
        figure = sheet(1.28 * len(columns), 1.44 * len(rows) + 0.45)
        places = figure.subplots(len(rows), len(columns), squeeze=False)
        for position, row in enumerate(rows):
            for place, column in zip(places[position], columns, strict=True):
                show_image(place, _image(row["pictures"], column, scale))
                if position == 0:
                    place.set_title(titles[column], fontsize=words_size, loc="center")
                if column in row["pictures"]:
                    answer = row["pictures"][column]
                    wrong = answer["prediction"] != row["label"]
                    words = f"{_name(names, answer['prediction'])}  {answer['probability']:.0%}"
                    place.set_xlabel(words, fontsize=words_size, labelpad=3, color=WRONG if wrong else INK)
                else:
                    place.set_xlabel(f"is {_name(names, row['label'])}", fontsize=words_size, labelpad=3)
    return figure


def _image(pictures: dict[str, Any], column: str, scale: float) -> Tensor:
    return 0.5 + scale * _change(pictures) if column == "difference" else unpack(pictures[column]["image"])


def _change(pictures: dict[str, Any]) -> Tensor:
    return unpack(pictures["adversarial"]["image"]) - unpack(pictures["clean"]["image"])


def _scale(rows: Sequence[dict[str, Any]]) -> float:
    """The largest round factor at which no difference leaves the scale."""
    most = max(float(_change(row["pictures"]).abs().max()) for row in rows)
    return next((factor for factor in (50.0, 20.0, 10.0, 5.0, 2.0) if factor * most <= 0.5 + 1e-6), 1.0)


def _name(names: Sequence[str], label: int) -> str:
    name = str(names[label]) if 0 <= label < len(names) else str(label)
    return name if len(name) <= 14 else name[:13] + "…"
