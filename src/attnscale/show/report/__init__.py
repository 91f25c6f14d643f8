"""Reports to send to a colleague: one HTML file each, which fetches nothing and in which every name is data."""

from attnscale.show.report.check import comparison_page, report_page
from attnscale.show.report.lab import lab_page
from attnscale.show.report.run import run_page, twins_page

__all__ = ["comparison_page", "lab_page", "report_page", "run_page", "twins_page"]
