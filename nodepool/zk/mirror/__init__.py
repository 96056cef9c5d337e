"""Live copies of records, fed by watches, with indexes."""
