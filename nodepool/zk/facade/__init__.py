"""The methods of `zookeeper.ZooKeeper`, by kind of record."""
