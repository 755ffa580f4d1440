"""SQL92 expressions over message properties: grammar, tree, values, evaluation. Pure."""
