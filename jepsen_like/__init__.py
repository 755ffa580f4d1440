"""Proof by attack: simulation, fault plans, histories, checkers and planted defects."""
