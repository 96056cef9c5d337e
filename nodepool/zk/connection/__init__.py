"""The connection to ZooKeeper and its sessions."""
