"""Synthetic histories of any length, clean or with one anomaly planted."""
