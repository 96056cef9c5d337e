"""The methods of `zookeeper.ZooKeeper`, by type of record."""
