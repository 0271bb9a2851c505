"""The report of a run, as one self-contained HTML file."""

from esper.ui.report.training import report_html, write_report

__all__ = ["report_html", "write_report"]
