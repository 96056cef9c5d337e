"""What tests share: scenes, peers, separate clouds."""
