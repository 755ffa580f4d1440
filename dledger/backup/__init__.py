"""Backups of a broker group: made from a member's data folder while it runs, checked, restored.

A backup is the committed entries of the group's log, from its first kept one on, and the tables
that go with the begin of that log. All else that a broker has follows from these two.
"""
