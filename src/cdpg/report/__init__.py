"""The report: writes one self-contained HTML file, and figures for a paper, from a run's files; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cdpg.errors import UserError

__all__ = ["write_figures", "write_report"]


def write_report(paths: Sequence[str | Path] | str | Path, output: str | Path) -> Path:
    """Write one HTML file on run and comparison folders; runs that are not comparable are in separate blocks."""
    _require_libraries()
    from cdpg.report.assembly import read_studies
    from cdpg.report.page import render
    from cdpg.report.writing import write_whole

    output = Path(output)
    write_whole(output, render(read_studies(_folders(paths))).encode("utf-8"))
    return output


def write_figures(paths: Sequence[str | Path] | str | Path, folder: str | Path) -> list[Path]:
    """Write every figure of the report as PDF and as PNG, named as the report names it; returns the files."""
    _require_libraries()
    from cdpg.report.assembly import read_studies
    from cdpg.report.charts import to_file
    from cdpg.report.figures import figures_of
    from cdpg.report.writing import make_folder

    charts = [chart for study in read_studies(_folders(paths)) for chart in figures_of(study)]
    folder = make_folder(Path(folder))
    files = [(chart, folder / f"{chart.name}{suffix}") for chart in charts for suffix in (".pdf", ".png")]
    for chart, file in files:
        to_file(chart, file)
    return [file for _, file in files]


def _folders(paths: Sequence[str | Path] | str | Path) -> list[Path]:
    """One folder or several."""
    return [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]


def _require_libraries() -> None:
    """Raise an error that says what to install, before anything is read."""
    try:
        import jinja2
        import matplotlib  # noqa: F401

        del jinja2
    except ImportError as error:
        raise UserError(
            f"a report needs the package {error.name!r}, which is not installed: pip install 'cdpg[report]'"
        ) from error
