"""Figures and tables for papers, each with the query that made it.

Importing this needs no matplotlib; drawing does.
"""
