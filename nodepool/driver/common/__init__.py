"""What drivers of clouds share: options, offers, tags, and machines that are made by one call and then looked at."""
