"""Pages to show: charts as SVG with text, in one HTML file without scripts, fonts or anything from a network."""

from isoload.analysis.pages import check_drawing
from isoload.report.page import code, figure, is_page, page, prose, section, table

__all__ = ["check_drawing", "code", "figure", "is_page", "page", "prose", "section", "table"]
