"""Sources of records: slices.xml, tickets, ZooKeeper."""
