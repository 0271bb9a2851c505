"""The report of a run or a comparison, as one self-contained HTML file."""
