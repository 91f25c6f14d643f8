"""Reports, each in one self-contained HTML file that fetches nothing and escapes every name."""

from attnscale.show.report.check import comparison_page, report_page
from attnscale.show.report.lab import lab_page
from attnscale.show.report.run import run_page, twins_page

__all__ = ["comparison_page", "lab_page", "report_page", "run_page", "twins_page"]
