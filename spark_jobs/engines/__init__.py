"""How rows reach the checks: pyarrow in this process, or Spark."""
