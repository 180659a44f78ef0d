"""Run folders in, one self-contained HTML page out.

runs.py      finds and reads the runs
clients.py   where each client's time went, worked out again from the configuration
document.py  everything the page shows, as one JSON document
page.py      the page: template, style, script, chart library and document in one file
"""

from splitcast.studies.report.page import write_report

__all__ = ["write_report"]
