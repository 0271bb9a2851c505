"""Figures and tables of reports and papers, each with the query or the files that its numbers come from."""
