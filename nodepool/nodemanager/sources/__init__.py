"""Where records come from: slices.xml, tickets, ZooKeeper."""
