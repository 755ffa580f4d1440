"""Columns: what rows prove, and whether it fits one list. Anomalies have no names here."""
