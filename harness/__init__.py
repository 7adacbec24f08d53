"""Turns runs into records, and records into tables, figures and reports."""
