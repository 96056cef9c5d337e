"""What tests share: scenes, peers, clouds of their own."""
