"""A report as Markdown, with its figures as PNG files beside it."""

from pathlib import Path

from menet.files import write_atomically
from menet.report.contents import Report, Section


def write_markdown(report: Report, file: Path) -> list[Path]:
    """Write `file` and a folder of figures named after it; return everything written."""
    figures = file.parent / f"{file.stem}-figures"
    written = []
    lines = [f"# {report.title}", "", *_paragraphs(report.introduction)]
    for section in report.sections:
        lines += [f"## {section.title}", "", *_section(section)]
        for picture in section.pictures:
            target = figures / f"{picture.name}.png"
            write_atomically(target, picture.png())
            written.append(target)
            lines += [f"![{picture.caption}]({figures.name}/{target.name})", "", f"*{picture.caption}*", ""]
    write_atomically(file, "\n".join(lines).rstrip() + "\n")
    return [file, *written]


def _section(section: Section) -> list[str]:
    lines = _paragraphs(section.paragraphs)
    for table in section.tables:
        lines += [f"### {table.title}", "", table.markdown(), ""]
        lines += _paragraphs((table.explanation,) if table.explanation else ())
    for finding in section.findings:
        lines.append(f"- **{finding['status']}** {finding['model']}, {finding['name']}: {finding['meaning']}")
        lines += [f"  - {name}: {value}" for name, value in finding["numbers"]]
    return [*lines, ""] if section.findings else lines


def _paragraphs(paragraphs: tuple[str, ...]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]
