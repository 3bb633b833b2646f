"""What all commands print and write: options, tables, figures, reports.

Begin with `results.py`; `report.py` makes the page.
"""
