"""One self-contained HTML page of a run, of a sweep or of a folder of runs."""

from components.report.page import write_page as write_page
from components.report.runs import FORECAST as FORECAST
from components.report.runs import Entry as Entry
from components.report.runs import RunPage as RunPage
from components.report.runs import is_forecast as is_forecast
