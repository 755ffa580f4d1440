"""What clients and faults did, one row each: schema, outcomes, file format. Pure."""
